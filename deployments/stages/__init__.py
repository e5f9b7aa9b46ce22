"""The stages as Ray Serve deployments: what runs in their replicas, and how they are called."""
