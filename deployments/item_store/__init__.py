"""What all replicas of the ingress share, and its clients there: items and their names, uploaded files."""
