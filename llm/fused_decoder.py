"""Runs all layers of a plain decoder in one call, on the CPU in float32 (`cpu_kernels.decoder`).

A decoder is plain if its layers are in the table here and if it gives what transformers' own forward gives. All others
run layer by layer.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpu_kernels.attention import LayerCache, StepChunks
from cpu_kernels.decoder import Activation, Decoder, DecoderLayer, Linear, Norm, Rope
from cpu_kernels.library import KernelLibrary
from llm.attention import AttentionCall
from modeling.packed_linear import KernelLinear


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a kind of layers calls its norms, and what is added to their weights."""

    mlp_input_norm: str = "post_attention_layernorm"
    attention_norm: str | None = None
    mlp_norm: str | None = None
    norm_offset: float = 0.0


_PLAIN = _Kind()
_GEMMA = _Kind(norm_offset=1.0)
_GEMMA_2 = _Kind("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm", 1.0)
_KINDS = {
    "LlamaDecoderLayer": _PLAIN,
    "MistralDecoderLayer": _PLAIN,
    "Qwen2DecoderLayer": _PLAIN,
    "Qwen2VLDecoderLayer": _PLAIN,
    "Qwen2_5_VLDecoderLayer": _PLAIN,
    "Qwen3DecoderLayer": _PLAIN,
    "Qwen3VLTextDecoderLayer": _PLAIN,
    "GemmaDecoderLayer": _GEMMA,
    "Gemma2DecoderLayer": _GEMMA_2,
    "Gemma3DecoderLayer": _GEMMA_2,
}
"""By the name of the class. A layer of transformers belongs here if its forward is that of `DecoderLayer`."""
_ACTIVATIONS: dict[str, Activation] = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


class FusedDecoder:
    """A decoder of transformers whose layers run in one call. It reads the weights that the decoder's modules hold."""

    def __init__(
        self,
        library: KernelLibrary,
        decoder: Any,
        calls: Sequence[AttentionCall],
        caches: Sequence[LayerCache],
        *,
        num_rope_axes: int,
        num_positions: int,
    ) -> None:
        """`calls`: each layer's, see `probe_layers`. Raises NotPlainError for a decoder that is not plain."""
        kinds = {type(layer).__name__ for layer in getattr(decoder, "layers", ())}
        if not kinds <= _KINDS.keys() or len(kinds) != 1:
            raise NotPlainError(f"layers of type {sorted(kinds) or type(decoder).__name__}")
        kind = _KINDS[kinds.pop()]
        activations = {type(layer.mlp.act_fn).__name__ for layer in decoder.layers}
        if not activations <= _ACTIVATIONS.keys() or len(activations) != 1:
            raise NotPlainError(f"activations of type {sorted(activations)}")
        rope_names = _rope_names(decoder)
        names = sorted(set(rope_names))
        layers = [
            _read_layer(layer, kind, call, caches[call.layer], names.index(rope_name))
            for layer, call, rope_name in zip(decoder.layers, calls, rope_names, strict=True)
        ]
        self._decoder = Decoder(
            library,
            layers,
            [_read_rope(decoder.rotary_emb, name, num_rope_axes, num_positions) for name in names],
            hidden_size=decoder.config.hidden_size,
            heads=calls[0].queries.shape[1],
            activation=_ACTIVATIONS[activations.pop()],
            final_norm=_read_norm(decoder.norm, kind),
        )

    def run(self, step: StepChunks, positions: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor | None:
        """Returns the hidden states behind the final norm, (num_tokens, hidden_size).

        `positions`: (num_rope_axes, num_tokens). `embeds`: (num_tokens, hidden_size). Returns None for a position
        beyond those that the rotary tables hold."""
        hidden = embeds.clone()
        return hidden if self._decoder.run(step, positions, hidden) else None


class NotPlainError(Exception):
    """The decoder has something that `cpu_kernels.decoder` does not know."""


def _read_layer(layer: Any, kind: _Kind, call: AttentionCall, cache: LayerCache, rope: int) -> DecoderLayer:
    def norm(owner: Any, name: str | None) -> Norm | None:
        return None if name is None or getattr(owner, name, None) is None else _read_norm(getattr(owner, name), kind)

    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        input_norm=_read_norm(layer.input_layernorm, kind),
        query=_read_linear(attention.q_proj),
        key=_read_linear(attention.k_proj),
        value=_read_linear(attention.v_proj),
        query_norm=norm(attention, "q_norm"),
        key_norm=norm(attention, "k_norm"),
        output=_read_linear(attention.o_proj),
        attention_norm=norm(layer, kind.attention_norm),
        mlp_input_norm=_read_norm(getattr(layer, kind.mlp_input_norm), kind),
        gate=_read_linear(mlp.gate_proj),
        up=_read_linear(mlp.up_proj),
        down=_read_linear(mlp.down_proj),
        mlp_norm=norm(layer, kind.mlp_norm),
        cache=cache,
        rope=rope,
        scaling=call.scaling,
        softcap=call.softcap,
        window=call.window,
    )


def _read_norm(module: Any, kind: _Kind) -> Norm:
    eps = getattr(module, "variance_epsilon", None) or module.eps
    return Norm((module.weight.detach() + kind.norm_offset).contiguous(), eps)


def _read_linear(module: nn.Module) -> Linear:
    if not isinstance(module, KernelLinear):
        raise NotPlainError(f"a {type(module).__name__} among its projections")
    return Linear(module.packed_weight, module.bias)


def _rope_names(decoder: Any) -> list[str]:
    """Returns the name of each layer's rotary embedding, or empty names where all have the same."""
    if "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters:
        return list(decoder.config.layer_types)
    return [""] * len(decoder.layers)


def _read_rope(rotary_embedding: Any, name: str, num_axes: int, num_positions: int) -> Rope:
    """Returns the table of a rotary embedding's turns at the first `num_positions` positions."""

    def turns(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes (num_axes, num_positions), returns cosines and sines, (num_positions, dim)."""
        arguments = (torch.empty(0), positions if num_axes == 1 else positions.unsqueeze(1))
        cosines, sines = rotary_embedding(*arguments, name) if name else rotary_embedding(*arguments)
        return cosines[0].contiguous(), sines[0].contiguous()

    cosines, sines = turns(torch.arange(num_positions).expand(num_axes, -1))
    axes = torch.zeros(cosines.shape[-1], dtype=torch.int64)
    for axis in range(1, num_axes):
        probe = torch.zeros(num_axes, 1, dtype=torch.int64)
        probe[axis] = 1
        axes[(turns(probe)[1][0] != 0) | (turns(probe)[0][0] != cosines[0])] = axis
    return Rope(cosines, sines, axes)
