"""Compiles decoder layers with torch.compile: norms, rotary embeddings, activations and sums become a kernel each.

Without it they are some thirty small kernels a layer, most of a step's launches. Layers of one kind share compiled
code. Attention and collectives between ranks are not compiled."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from raylens.llm.ranks.parallel import RankDiedError

logger = logging.getLogger(__name__)

_FEW_TOKENS = 13
# The most variants of a layer's code that PyTorch compiles; further ones run uncompiled. PyTorch's default is 8.
_MOST_KINDS = 64
# Rounds between the operations of a fused kernel, as the uncompiled model does.
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}


def compile_layers(
    decoder: nn.Module, run: Callable[[int], object], max_num_tokens: int, *, is_one_of_several: bool
) -> None:
    """Compiles the decoder's layers, in place. `run(num_tokens)` computes a step as the engine does later, so that no
    later step of up to `max_num_tokens` waits for the compiler.

    A decoder that cannot be compiled stays uncompiled, with a warning. With `is_one_of_several` this raises
    RuntimeError instead, because other ranks may wait for this one within a step."""
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
    """Returns the numbers of tokens to compile with: one for any number, one for layers with another code path for many
    tokens, and 1. All are odd, because PyTorch would equate the number of tokens with an equal size in the model."""
    most = (max_num_tokens - 1) | 1
    return [*sorted({min(_FEW_TOKENS, most), most} - {1}), 1]
