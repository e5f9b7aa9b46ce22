"""Runs a tower over a few tiles as a CUDA graph, so that the host launches all of its kernels at once.

A graph reads and writes the same memory each time. One graph exists for each of some numbers of tiles, recorded on
first use, and a batch takes the smallest graph that fits. A larger batch runs without a graph, because it keeps the GPU
busy for longer than the host needs to launch its kernels."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from transformers import PreTrainedModel

from raylens.encoder.config import EncoderConfig
from raylens.encoder.models.family import VisionFamily
from raylens.modeling.cuda_graphs import CudaCapture, NotRecordableError

logger = logging.getLogger(__name__)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""The numbers of tiles that may have a graph."""

_MEMORY_SHARE = 1 / 16
"""The largest share of the GPU's memory that the graphs may take."""

Replay = Callable[[], Any]


@dataclass(slots=True)
class _Graphs:
    """The graphs that read one buffer of tiles, (largest of SIZES, ...), by their number of tiles."""

    tiles: torch.Tensor
    replays: dict[int, Replay] = field(default_factory=dict)


class TowerGraphs:
    """Replaces a tower's `forward`.

    The tower's outputs are valid until its next call. The caller must read them on the same stream before that, as a
    projector does."""

    def __init__(self, tower: nn.Module, capture: CudaCapture, *, max_bytes: int) -> None:
        """`max_bytes`: once the graphs take as much, no more are recorded, and other batches run without graphs."""
        self.max_bytes = max_bytes
        self._eager: Callable[..., Any] = tower.forward
        self._capture = capture
        self._graphs: dict[object, _Graphs] = {}
        self.is_measured = False
        """While true, the tower runs without graphs, so that its memory can be counted."""
        tower.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if self.is_measured or len(places) != 1 or not 0 < len(leaves[places[0]]) <= SIZES[-1]:
            return self._eager(*args, **kwargs)
        (place,) = places
        tiles = leaves[place]

        def compute(inputs: torch.Tensor) -> Any:
            own_args, own_kwargs = tree_unflatten([*leaves[:place], inputs, *leaves[place + 1 :]], structure)
            return self._eager(*own_args, **own_kwargs)

        key = (str(structure), place, *leaves[:place], *leaves[place + 1 :], tiles.shape[1:], tiles.dtype)
        replay = self._replay(key, tiles, compute)
        if replay is None:
            return compute(tiles)
        self._graphs[key].tiles[: len(tiles)].copy_(tiles)
        return tree_map(lambda value: value[: len(tiles)] if isinstance(value, torch.Tensor) else value, replay())

    def _replay(self, key: object, tiles: torch.Tensor, compute: Callable[[torch.Tensor], Any]) -> Replay | None:
        """Returns the smallest graph for at least as many tiles, recorded if necessary.

        Returns None if there is no memory for another graph, or if the tower cannot be recorded. Passes on the tower's
        own errors."""
        size = next(size for size in SIZES if size >= len(tiles))
        if key in self._graphs and size in self._graphs[key].replays:
            return self._graphs[key].replays[size]
        if self._capture.num_bytes >= self.max_bytes:
            return None
        if key not in self._graphs:
            self._graphs[key] = _Graphs(tiles.new_zeros(SIZES[-1], *tiles.shape[1:]))
        graphs = self._graphs[key]
        inputs = graphs.tiles[:size]
        try:
            graphs.replays[size] = self._record(lambda: compute(inputs), size)
        except (NotRecordableError, torch.OutOfMemoryError) as error:
            is_full = isinstance(error, torch.OutOfMemoryError)
            reason = "the GPU has no memory for its CUDA graphs" if is_full else "it cannot run as CUDA graphs"
            logger.warning("small batches of this tower will be slower: %s", reason, exc_info=True)
            self.max_bytes = 0
            return None
        return graphs.replays[size]

    def _record(self, function: Replay, size: int) -> Replay:
        shapes: list[torch.Size] = []

        def observed() -> Any:
            outputs = function()
            shapes.extend(value.shape for value in tree_leaves(outputs) if isinstance(value, torch.Tensor))
            return outputs

        replay = self._capture(observed)
        if any(shape[:1] != (size,) for shape in shapes):
            raise NotRecordableError(f"of {size} tiles the tower makes {shapes}")
        return replay


def make_graphs(model: PreTrainedModel, family: VisionFamily, config: EncoderConfig) -> TowerGraphs | None:
    """Returns the tower's CUDA graphs, or None without a GPU, with parts on two devices, or for a family without
    `has_tiles`."""
    if not family.has_tiles or not config.is_on_one_gpu:
        return None
    device = torch.device(config.tower.device)
    max_bytes = int(torch.cuda.get_device_properties(device).total_memory * _MEMORY_SHARE)
    return TowerGraphs(model.get_submodule(family.tower), CudaCapture(device), max_bytes=max_bytes)
