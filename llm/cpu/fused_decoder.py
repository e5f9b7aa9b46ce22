"""Runs a plain decoder in one call, on the CPU in float32 (`cpu_kernels/decoder.py`), from token ids to logits.

It is plain if its layers are in the table below and its results match transformers'. Others run layer by layer."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from raylens.cpu_kernels.attention import LayerCache, StepChunks
from raylens.cpu_kernels.decoder import Decoder, DecoderLayer, Embedding
from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.mlp import Linear
from raylens.cpu_kernels.norm import Norm
from raylens.cpu_kernels.rotary import Rope
from raylens.llm.attention import AttentionCall
from raylens.llm.models.family import LanguageFamily, embed_tokens, no_inputs, output_head
from raylens.llm.step_input import StepInput
from raylens.modeling.kernel_mlp import kernel_activation
from raylens.modeling.kernel_norm import epsilon_of
from raylens.modeling.packed_linear import KernelLinear, PackedEmbedding


@dataclass(frozen=True, slots=True)
class _Kind:
    """The attribute names of a layer's norms, and the number added to their weights."""

    mlp_input_norm: str = "post_attention_layernorm"
    attention_norm: str | None = None
    mlp_norm: str | None = None
    norm_offset: float = 0.0


_PLAIN = _Kind()
_GEMMA_2 = _Kind("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm", 1.0)
_PLAIN_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen2VL", "Qwen2_5_VL", "Qwen3", "Qwen3VLText")
_KINDS = {
    **{f"{family}DecoderLayer": _PLAIN for family in _PLAIN_FAMILIES},
    "GemmaDecoderLayer": _Kind(norm_offset=1.0),
    "Gemma2DecoderLayer": _GEMMA_2,
    "Gemma3DecoderLayer": _GEMMA_2,
}
"""By class name: the layers of transformers whose forward equals that of `DecoderLayer`."""


class FusedDecoder:
    """The decoder of a language half, in one call, with its embedding and output head unless the family computes its
    own. It shares its weights with transformers' modules."""

    def __init__(
        self,
        library: KernelLibrary,
        model: Any,
        family: LanguageFamily,
        calls: Sequence[AttentionCall],
        caches: Sequence[LayerCache],
        *,
        num_positions: int,
        max_num_tokens: int,
        max_num_logits: int,
    ) -> None:
        """`calls`: each layer's, see `probe_layers`. Raises NotPlainError for a decoder that is not plain."""
        decoder: Any = family.find_decoder(model)
        kinds = {type(layer).__name__ for layer in getattr(decoder, "layers", ())}
        if not kinds <= _KINDS.keys() or len(kinds) != 1:
            raise NotPlainError(f"layers of type {sorted(kinds) or type(decoder).__name__}")
        kind = _KINDS[kinds.pop()]
        if family.inputs_of_tokens is not no_inputs or family.takes_item_mask:
            raise NotPlainError("inputs beside the embeddings of its tokens")
        if family.spans_need_window:
            raise NotPlainError("spans in some of its layers")
        activations = {kernel_activation(layer.mlp.act_fn) for layer in decoder.layers}
        activation = activations.pop()
        if activation is None or activations:
            raise NotPlainError(f"activations of type {type(decoder.layers[0].mlp.act_fn).__name__}")
        rope_names = _rope_names(decoder)
        names = sorted(set(rope_names))
        self._ropes = [_RopeReader(decoder.rotary_emb, name, family.num_rope_axes) for name in names]
        layers = [
            _read_layer(layer, kind, call, caches[call.layer], names.index(rope_name))
            for layer, call, rope_name in zip(decoder.layers, calls, rope_names, strict=True)
        ]
        embedding, head = _read_embedding(model, family), _read_head(model, family)
        self.has_embedding = embedding is not None
        """Whether `run` looks up the embeddings of tokens."""
        self._decoder = Decoder(
            library,
            layers,
            [rope.read(torch.arange(num_positions)) for rope in self._ropes],
            hidden_size=decoder.config.hidden_size,
            heads=calls[0].queries.shape[1],
            activation=activation,
            final_norm=_read_norm(decoder.norm, kind),
            embedding=embedding,
            head=head,
        )
        # Each step overwrites the results of the step before, as a CUDA graph does.
        self._hidden = torch.empty(max_num_tokens, decoder.config.hidden_size)
        self._logits = None if head is None else torch.empty(max_num_logits, head.weight.layout.out_features)

    def run(
        self,
        chunks: StepChunks,
        step: StepInput,
        embeds: torch.Tensor | None,
        levels: torch.Tensor | None,
        *,
        wants_all_hidden: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the hidden states after the final norm, (num_tokens, hidden_size), and the logits of
        `step.logits_rows`, or None if the call has no head. The next run overwrites both.

        `embeds`: (num_tokens, hidden_size), or None to look up the tokens' embeddings. `levels`: the deepstack
        embeddings of `step.embed_rows`, (num_embeds, levels * hidden_size), or None. Without `wants_all_hidden` only
        the hidden states of `step.logits_rows` are computed."""
        hidden = self._hidden[: len(step.token_ids)]
        if embeds is not None:
            hidden.copy_(embeds)
        logits = None if self._logits is None else self._logits[: len(step.logits_rows)]
        run = partial(
            Decoder.run,
            chunks=chunks,
            hidden=hidden,
            token_ids=step.token_ids if embeds is None else None,
            logits_rows=step.logits_rows,
            logits=logits,
            wants_all_hidden=wants_all_hidden,
            level_rows=None if levels is None else step.embed_rows,
            levels=levels,
        )
        if not run(self._decoder, positions=step.positions):
            places = torch.unique(step.positions)
            ropes = [rope.read(places) for rope in self._ropes]
            run(self._decoder.with_ropes(ropes), positions=torch.searchsorted(places, step.positions.contiguous()))
        return hidden, logits


class NotPlainError(Exception):
    """The decoder has a part that `cpu_kernels/decoder.py` does not implement."""


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
    eps = epsilon_of(module)
    assert eps is not None, "the kind of decoder has RMS norms"
    return Norm((module.weight.detach() + kind.norm_offset).contiguous(), eps)


def _read_linear(module: nn.Module) -> Linear:
    if not isinstance(module, KernelLinear):
        raise NotPlainError(f"a {type(module).__name__} among its projections")
    return Linear(module.packed_weight, module.bias)


def _read_embedding(model: Any, family: LanguageFamily) -> Embedding | None:
    """Returns the embedding, or None if the family does more than to look up tokens in it."""
    module = model.get_input_embeddings()
    if family.embed_tokens is not embed_tokens or not isinstance(module, PackedEmbedding):
        return None
    return Embedding(module.packed_weight, module.scale)


def _read_head(model: Any, family: LanguageFamily) -> Linear | None:
    """Returns the output head, or None if the family's logits are more than its product."""
    module = model.get_output_embeddings()
    if family.logits is not output_head or not isinstance(module, KernelLinear):
        return None
    return _read_linear(module)


def _rope_names(decoder: Any) -> list[str]:
    """Returns the name of each layer's rotary embedding, or empty names if all layers share one."""
    if "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters:
        return list(decoder.config.layer_types)
    return [""] * len(decoder.layers)


class _RopeReader:
    """Reads the rotations of a rotary embedding: of the part `name`, if it has several."""

    def __init__(self, rotary_embedding: Any, name: str, num_axes: int) -> None:
        self._rotary_embedding, self._name, self._num_axes = rotary_embedding, name, num_axes
        cosines, _ = self._turns(torch.zeros(num_axes, 1, dtype=torch.int64))
        self._axes = torch.zeros(cosines.shape[-1], dtype=torch.int64)
        for axis in range(1, num_axes):
            probe = torch.zeros(num_axes, 1, dtype=torch.int64)
            probe[axis] = 1
            turned, sines = self._turns(probe)
            self._axes[(sines[0] != 0) | (turned[0] != cosines[0])] = axis

    def read(self, positions: torch.Tensor) -> Rope:
        """Returns the table of the rotations at these positions, (num_positions,)."""
        return Rope(*self._turns(positions.expand(self._num_axes, -1)), self._axes)

    def _turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes (num_axes, num_positions), returns cosines and sines, (num_positions, dim)."""
        own = positions if self._num_axes == 1 else positions.unsqueeze(1)
        cosines, sines = self._rotary_embedding(torch.empty(0), own, *([self._name] if self._name else []))
        return cosines[0].contiguous(), sines[0].contiguous()
