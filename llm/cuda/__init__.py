"""Attention by FlashAttention and Triton, CUDA graphs of decode steps, and compilation before the first request."""
