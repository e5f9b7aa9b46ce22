"""The state that all replicas of the ingress share, and its clients: items and their names, uploaded files."""
