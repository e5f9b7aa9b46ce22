"""The stages as Ray Serve deployments: the code in their replicas, and the calls to them."""
