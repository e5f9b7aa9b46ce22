"""Decoder layers through torch.compile: norms, rotary embeddings, activations and sums become a kernel each.

Run one by one they are some thirty small kernels a layer, most of what a step launches. Layers of one kind share their
code, which is compiled once for all of them; attention and collectives between ranks stay as they are.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from llm.parallel import RankDiedError

logger = logging.getLogger(__name__)

_FEW_TOKENS = 13
# Beyond so many kinds of layers and sizes PyTorch would leave the rest as it is; 8 is its own number.
_MOST_KINDS = 64
# A fused kernel would keep more digits between its operations than the model does.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}


def compile_layers(
    decoder: nn.Module, run: Callable[[int], object], max_num_tokens: int, *, is_one_of_several: bool
) -> None:
    """Compiles the decoder's layers, in place. `run` computes a step of so many tokens in just the way in which steps
    are computed later: that compiles them, so that none of up to `max_num_tokens` has to wait for it.

    A decoder that cannot be compiled stays as it is, with a warning; as one of several ranks' it raises RuntimeError,
    for the others may wait for it in the middle of a step.
    """
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, options=_OPTIONS)
    try:
        with torch._dynamo.config.patch(recompile_limit=_MOST_KINDS):
            for num_tokens in _sizes(max_num_tokens):
                run(num_tokens)
    except (torch.AcceleratorError, torch.OutOfMemoryError, RankDiedError):
        raise
    except Exception as error:
        if is_one_of_several:
            raise RuntimeError(
                "the layers of this model cannot be compiled; with TORCH_COMPILE_DISABLE=1 in the environment of all"
                " ranks they are not"
            ) from error
        logger.warning("the layers of this model cannot be compiled; steps will be slower", exc_info=True)
        for layer in layers:
            del layer.forward


def _sizes(max_num_tokens: int) -> list[int]:
    """Kernels for any number of tokens are made at the first, those for one alone at the last; in between, those of
    layers that do something else for many. Odd, for a number that the model has elsewhere, as of heads or of hidden
    states' size, would be taken for the same one."""
    most = (max_num_tokens - 1) | 1
    return [*sorted({min(_FEW_TOKENS, most), most} - {1}), 1]
