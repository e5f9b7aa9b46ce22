"""Restricts PyTorch's attention kernels in this process."""

import torch


def turn_off_cudnn_attention() -> None:
    """Excludes cuDNN from `scaled_dot_product_attention`, in the whole process. Every engine calls this before any
    computation.

    cuDNN builds a plan for each new shape, and prompts have any length: the first prompt of each length would delay all
    sequences. Recent versions of PyTorch prefer cuDNN on some GPUs."""
    torch.backends.cuda.enable_cudnn_sdp(False)
