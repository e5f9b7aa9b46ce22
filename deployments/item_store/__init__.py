"""State shared by all ingress replicas, and its clients: items, their names, and uploaded files."""
