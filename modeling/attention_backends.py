"""Which of PyTorch's attention kernels this process uses."""

import torch


def turn_off_cudnn_attention() -> None:
    """Makes `scaled_dot_product_attention` choose among its other kernels, in the whole process. Every engine calls
    this before it computes anything.

    cuDNN makes a plan for each new shape, and prompts have any length: the first one of each length would hold up all
    sequences meanwhile. With recent versions PyTorch prefers cuDNN on some GPUs."""
    torch.backends.cuda.enable_cudnn_sdp(False)
