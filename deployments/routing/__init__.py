"""How Ray Serve chooses a replica for a call, and how many replicas it runs."""
