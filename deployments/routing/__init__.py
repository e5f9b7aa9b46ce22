"""Chooses a replica for each call, and the number of replicas."""
