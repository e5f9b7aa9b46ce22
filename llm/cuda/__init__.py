"""Attention by FlashAttention and Triton, CUDA graphs of decoding steps, and what compiles before the first request."""
