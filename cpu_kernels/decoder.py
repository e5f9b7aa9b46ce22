"""A plain decoder in one call, from token ids to logits. The structures mirror `csrc/decoder.h`."""

import ctypes
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from raylens.cpu_kernels.attention import LayerCache, StepChunks
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.mlp import ACTIVATIONS, Activation, Linear, LinearStructure
from raylens.cpu_kernels.norm import Norm, NormStructure
from raylens.cpu_kernels.packed_weight import PackedWeight
from raylens.cpu_kernels.rotary import Rope, RopeStructure
from raylens.cpu_kernels.structures import address_of, addresses, floats, integers
from raylens.cpu_kernels.threads import num_threads


@dataclass(frozen=True, slots=True)
class Embedding:
    """`weight`: (vocab, hidden_size). Looked-up rows are multiplied by `scale`."""

    weight: PackedWeight
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """hidden += attention_norm(output(attention(input_norm(hidden)))), then
    hidden += mlp_norm(down(activation(gate(x)) * up(x))) with x = mlp_input_norm(hidden).

    `query_norm` and `key_norm` apply to each head before its rotation by the decoder's `ropes[rope]`."""

    input_norm: Norm
    query: Linear
    key: Linear
    value: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    attention_norm: Norm | None
    mlp_input_norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    mlp_norm: Norm | None
    cache: LayerCache
    rope: int
    scaling: float
    softcap: float | None
    window: int | None


_NORMS = ("input_norm", "query_norm", "key_norm", "attention_norm", "mlp_input_norm", "mlp_norm")
_LINEARS = ("query", "key", "value", "output", "gate", "up", "down")


class _DecoderLayer(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, NormStructure) for name in _NORMS),
        *((name, LinearStructure) for name in _LINEARS),
        *addresses("cache"),
        *integers("rope", "window"),
        *floats("scaling", "softcap"),
    ]

    @classmethod
    def of(cls, layer: DecoderLayer) -> "_DecoderLayer":
        norms = (NormStructure.of(getattr(layer, name)) for name in _NORMS)
        linears = (LinearStructure.of(getattr(layer, name)) for name in _LINEARS)
        numbers = (layer.rope, layer.window or 0, layer.scaling, layer.softcap or 0.0)
        return cls(*norms, *linears, layer.cache.address, *numbers)


class _Decoder(ctypes.Structure):
    _fields_ = [
        *addresses("layers", "ropes", "embedding"),
        *integers("num_layers", "num_ropes", "hidden_size", "heads", "activation"),
        ("final_norm", NormStructure),
        ("head", LinearStructure),
        *floats("embedding_scale"),
    ]


class _StepRows(ctypes.Structure):
    _fields_ = [
        *addresses("positions", "token_ids", "logits_rows", "hidden", "logits", "level_rows", "levels"),
        *integers("position_stride", "num_logits", "wants_all_hidden", "num_level_rows", "level_stride", "num_levels"),
    ]


class Decoder:
    """The layers of a decoder, with `heads` query heads each, and the final norm. Optionally also the embedding and the
    output head."""

    def __init__(
        self,
        library: KernelLibrary,
        layers: Sequence[DecoderLayer],
        ropes: Sequence[Rope],
        *,
        hidden_size: int,
        heads: int,
        activation: Activation,
        final_norm: Norm,
        embedding: Embedding | None = None,
        head: Linear | None = None,
    ) -> None:
        self._library = library
        self._kept = (layers, final_norm, embedding, head)  # the structures hold addresses of what these own
        self._layers = (_DecoderLayer * len(layers))(*map(_DecoderLayer.of, layers))
        self._own = _Decoder(
            layers=ctypes.addressof(self._layers),
            num_layers=len(layers),
            num_ropes=len(ropes),
            hidden_size=hidden_size,
            heads=heads,
            activation=ACTIVATIONS.index(activation),
            final_norm=NormStructure.of(final_norm),
            head=LinearStructure.of(head),
        )
        if embedding is not None:
            self._own.embedding, self._own.embedding_scale = embedding.weight.address, embedding.scale
        self._set_ropes(ropes)

    def _set_ropes(self, ropes: Sequence[Rope]) -> None:
        self._kept_ropes, self._ropes = ropes, (RopeStructure * len(ropes))(*map(RopeStructure.of, ropes))
        self._own.ropes = ctypes.addressof(self._ropes)
        self._address = ctypes.addressof(self._own)

    def with_ropes(self, ropes: Sequence[Rope]) -> "Decoder":
        """Returns the same decoder with other tables, equally many, for positions beyond its own tables."""
        other = copy(self)
        other._own = _Decoder.from_buffer_copy(self._own)
        other._set_ropes(ropes)
        return other

    def run(
        self,
        chunks: StepChunks,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        *,
        token_ids: torch.Tensor | None = None,
        logits_rows: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        wants_all_hidden: bool = True,
        level_rows: torch.Tensor | None = None,
        levels: torch.Tensor | None = None,
    ) -> bool:
        """Fills `hidden`, (num_tokens, hidden_size), float32, with the hidden states after the final norm.

        On entry `hidden` holds the embeddings, unless `token_ids`, (num_tokens,) int64, are given to look them up.
        `positions`: (axes, num_tokens), int64. With a head, the logits of the tokens `logits_rows`, (num_logits,)
        int64, ascending, are written to `logits`, (num_logits, vocab), float32. Without `wants_all_hidden` only the
        rows `logits_rows` of `hidden` are filled, which saves most of the last layer.

        `levels`: (num_rows, levels * hidden_size), float32, the deepstack embeddings of the tokens `level_rows`,
        (num_rows,) int64. The output of each of the first layers gets one level added.

        Returns False, and changes nothing, if a position is beyond the ropes' tables."""
        assert hidden.is_contiguous(), "hidden states lie row by row"
        assert positions.stride(-1) == 1, "the positions of an axis lie one behind the other"
        tensors = (positions, token_ids, logits_rows, hidden, logits, level_rows, levels)
        num_logits = 0 if logits_rows is None else len(logits_rows)
        step = _StepRows(*map(address_of, tensors), positions.stride(0), num_logits, wants_all_hidden)
        if levels is not None:
            step.num_level_rows, step.level_stride = len(levels), levels.stride(0)
            step.num_levels = levels.shape[1] // hidden.shape[1]
        step_address = ctypes.addressof(step)
        return bool(self._library.decode(self._address, chunks.address, step_address, num_threads()))
