"""Tensor parallelism: the layers of one model divided among processes that run each step together."""
