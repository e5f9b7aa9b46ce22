"""Tensor parallelism: several processes hold parts of each layer of one model and run each step together."""
