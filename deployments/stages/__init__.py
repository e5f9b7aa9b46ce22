"""The stages as Ray Serve deployments: what runs in their replicas, what travels between them, and how Ray Serve routes
calls to the replicas and scales them."""
