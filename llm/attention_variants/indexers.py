"""Sparse attention by indexers: small modules of layers that choose the positions that each token sees.

transformers' indexer computes. It keeps a key of its own for each position, in a cache beside those of the layers, in
the same slots. It runs sequence by sequence, and finds here what it expects of transformers' cache and masks."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from raylens.llm.attention import AttentionBackend, LayerShape
from raylens.llm.attention_variants.chosen_positions import ChoosingBackend, ChosenStep, positions_of
from raylens.llm.layer_types import INDEXED
from raylens.llm.step_input import StepInput


@dataclass(frozen=True, slots=True)
class _Kind:
    """`read(indexer, result, causal)`: the `ChosenPositions.mask` of an indexer's result. `causal`: a causal mask,
    (num_queries, num_positions). `mask(causal)`: the mask that the indexer takes. `takes_all_rotations`: whether it
    takes the rotations of all positions, not of its tokens only."""

    read: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
    mask: Callable[[torch.Tensor], torch.Tensor] = lambda causal: causal.unsqueeze(0)
    takes_all_rotations: bool = False


def _read_positions(indexer: Any, result: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    """Takes positions (1, num_queries, most positions of a query), with -1 for none. Some may not be visible."""
    num_queries, num_positions = causal.shape
    places = torch.where(result[0] < 0, num_positions, result[0].long())
    chosen = causal.new_zeros(num_queries, num_positions + 1).scatter_(1, places, True)
    return chosen[:, :-1] & causal


def _read_mask(indexer: Any, result: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    """Takes a mask (1, 1, num_queries, num_positions)."""
    return result[0, 0] & causal


def _read_blocks(indexer: Any, result: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
    """Takes blocks of positions (1, groups of heads, num_queries, most blocks of a query), with -1 for none."""
    num_groups, num_positions = result.shape[1], causal.shape[1]
    num_blocks = -(-num_positions // indexer.block_size)
    places = torch.where(result[0] < 0, num_blocks, result[0])
    chosen = causal.new_zeros(*places.shape[:2], num_blocks + 1).scatter_(2, places, True)[..., :-1]
    by_position = chosen.repeat_interleave(indexer.block_size, dim=2)[..., :num_positions] & causal
    return by_position.repeat_interleave(indexer.config.num_attention_heads // num_groups, dim=0)


_KINDS = {
    "Dots3NoteTextIndexer": _Kind(_read_positions),
    "Glm5NextTextIndexer": _Kind(_read_positions, lambda causal: causal.new_ones(1, len(causal))),
    "MiniMaxM3VLIndexer": _Kind(_read_blocks),
    "MistralLarge4TextIndexer": _Kind(_read_positions),
    "Qwen4ExpTextQSAIndexer": _Kind(_read_mask, lambda causal: causal[None, None], takes_all_rotations=True),
}
"""By class name."""


def find_indexers(decoder: nn.Module) -> list[nn.Module]:
    """Returns the indexers of all layers, in order."""
    return [module for name, module in decoder.named_modules() if name.endswith(".indexer")]


def is_outside_indexers(name: str) -> bool:
    """Returns whether a module is part of no indexer. Indexers look at their weights, which therefore stay plain."""
    return ".indexer." not in name


class Indexers:
    """The indexers of a decoder. The forward of each runs chunk by chunk from then on."""

    def __init__(
        self, indexers: Sequence[nn.Module], layer_types: Sequence[str], num_layers: int, block_size: int
    ) -> None:
        """`layer_types`: those of the decoder. `num_layers`: the layers with a KV cache; the caches of index keys have
        the next numbers. Raises ValueError for an unknown type of indexer."""
        self._dims = [0] * len(indexers)
        self._step: ChosenStep | None = None
        self._num_layers = num_layers
        self._block_size = block_size
        # Keeps the decoder from making masks.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        masks = {kind: mask if kind in INDEXED else None for kind in layer_types}
        self.inputs: dict[str, Any] = {"attention_mask": masks}
        """Further inputs of the decoder."""
        for number, indexer in enumerate(indexers):
            name = type(indexer).__name__
            if name not in _KINDS:
                raise ValueError(f"layers with an indexer of type {name} are not supported")
            choose = partial(_choose, indexer, indexer.forward, _KINDS[name])
            indexer.forward = partial(self._forward, num_layers + number, choose)

    @property
    def shapes(self) -> list[LayerShape]:
        """Returns the shapes of the caches of index keys, known after a first forward."""
        return [LayerShape(1, dim, 0, None) for dim in self._dims]

    @contextmanager
    def of(self, step: StepInput, attention: AttentionBackend) -> Iterator[ChosenStep]:
        """Lets forwards within this context compute the chunks of `step`, with the attention that it yields."""
        assert isinstance(attention, ChoosingBackend)
        self._step = ChosenStep(attention, positions_of(step, self._block_size))
        try:
            yield self._step
        finally:
            self._step = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward(self, layer: int, choose: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Notes the chosen positions of all chunks. The layer hands on the result, which nothing reads."""
        step = self._step
        if step is None:  # the first forward, of one token, which shows the sizes
            choose(args, kwargs, slice(0, 1), 1, partial(self._note, layer))
        else:
            for chunk in step.chosen:
                extend = partial(step.attention.extend_index, layer, chunk.rows, chunk.slots)
                chunk.mask = choose(args, kwargs, chunk.rows, len(chunk.slots), extend)
        return torch.zeros(1, 1, 1, dtype=torch.int64)

    def _note(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        self._dims[layer - self._num_layers] = keys.shape[-1]
        return keys


def _choose(
    indexer: nn.Module,
    forward: Callable[..., torch.Tensor],
    kind: _Kind,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rows: slice,
    num_positions: int,
    extend: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns the `ChosenPositions.mask` of the tokens `rows`. `args`, `kwargs`: the indexer's for all tokens.
    `extend`: takes the tokens' index keys, returns those of all positions."""
    given = inspect.signature(forward).bind(*args, **kwargs).arguments
    num_queries = rows.stop - rows.start
    causal = torch.ones(num_queries, num_positions, dtype=torch.bool, device=given["hidden_states"].device)
    causal = causal.tril_(num_positions - num_queries)
    own = {name: _part(value, rows) for name, value in given.items()}
    if kind.takes_all_rotations:
        own["position_embeddings"], extend = _with_rotations(own["position_embeddings"], num_positions, extend)
    own["past_key_values"] = _IndexCache(extend, num_positions)
    if "attention_mask" in given:
        own["attention_mask"] = kind.mask(causal)
    return kind.read(indexer, forward(**own), causal)


def _with_rotations(
    own: tuple[torch.Tensor, ...], num_positions: int, extend: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the cosines and sines of all positions, and an `extend` that keeps them behind the index keys. Those of
    earlier positions are there once the tokens' keys are stored. `own`: of the tokens, (1, num_tokens, dim) each."""
    rotations = torch.cat(own, dim=-1)[0]
    everything = rotations.new_empty(num_positions, rotations.shape[-1])
    everything[-len(rotations) :] = rotations

    def extend_both(keys: torch.Tensor) -> torch.Tensor:
        rows = extend(torch.cat([keys, rotations.to(keys.dtype)], dim=-1))
        everything.copy_(rows[:, keys.shape[-1] :])
        return rows[:, : keys.shape[-1]]

    return everything.unsqueeze(0).chunk(2, dim=-1), extend_both


def _part(value: Any, rows: slice) -> Any:
    """Returns the `rows` of a tensor (1, num_tokens, ...), or of each of several."""
    return value[:, rows] if isinstance(value, torch.Tensor) else value and tuple(one[:, rows] for one in value)


class _IndexCache:
    """What an indexer takes for transformers' cache: the index keys of one sequence, see `DynamicIndexedLayer`."""

    def __init__(self, extend: Callable[[torch.Tensor], torch.Tensor], num_positions: int) -> None:
        self._extend = extend
        self._num_positions = num_positions
        self.keys = torch.empty(num_positions, 0)

    @property
    def layers(self) -> "_IndexCache":
        return self

    def __getitem__(self, layer_idx: int) -> "_IndexCache":
        return self

    def get_seq_length(self) -> int:
        return self._num_positions

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Takes (1, num_tokens, dim), returns (1, num_positions, dim)."""
        return self._extend(keys[0]).unsqueeze(0)

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """Takes (1, 1, num_tokens, dim), returns (1, 1, num_positions, dim)."""
        return self._extend(keys[0, 0])[None, None]
