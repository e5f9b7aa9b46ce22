"""Attention and whole decoders by the kernels of `cpu_kernels`."""
