"""Loads a checkpoint so that each rank reads only its own part of each weight."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Split,
    Transpose,
)

from raylens.llm.ranks.parallel import ProcessGroup
from raylens.llm.ranks.partition import Partition, joined
from raylens.llm.ranks.sharding import check_shapes, shard
from raylens.modeling.stored_weights import Target, find_targets


def sharded_class(
    model_class: type[PreTrainedModel], decoder: Callable[[PreTrainedModel], nn.Module], group: ProcessGroup
) -> type[PreTrainedModel]:
    """Returns a subclass of `model_class` that loads only this rank's part of the language half, from the weights that
    `stored_class` opens. It raises the errors of `shard`, and ValueError for a conversion that needs a whole weight."""

    class Sharded(model_class):
        # transformers still renames keys, converts dtypes and merges experts itself.
        @staticmethod
        def _load_pretrained_model(
            model: PreTrainedModel, slices: dict[str, Any], files: None, load_config: Any, **_: Any
        ) -> tuple[Any, Any]:
            partitions = shard(model, decoder(model), group)
            parts = _parts(model, slices, partitions, load_config.weight_mapping or [])
            loaded = model_class._load_pretrained_model(model, parts, None, load_config)
            check_shapes(model, partitions)
            return loaded  # type: ignore[no-any-return]

    # transformers looks up its renamings of checkpoint keys by module and name of the class.
    Sharded.__module__, Sharded.__name__ = model_class.__module__, model_class.__name__
    return Sharded


class StoredPart:
    """A rank's part of a weight in a file. `part[...]`, as transformers calls it, reads the part."""

    def __init__(self, stored: Any, partition: Partition) -> None:
        self._stored = stored
        self._partition = partition.of_shape(tuple(stored.get_shape()))

    def __getitem__(self, index: Any) -> torch.Tensor:
        assert index is Ellipsis
        return self._partition.read(self._stored, len(self._stored.get_shape()))


def _parts(
    model: PreTrainedModel, slices: dict[str, Any], partitions: dict[str, Partition], mapping: list[Any]
) -> dict[str, Any]:
    """Returns `slices` by checkpoint key, with this rank's part in place of each divided weight."""
    expected = model.state_dict()
    targets = find_targets(model, slices, mapping, expected)
    by_name: dict[str, list[Target]] = {}
    for entry in targets.values():
        by_name.setdefault(entry.name, []).append(entry)
    parts: dict[str, Any] = {}
    for key, entry in targets.items():
        partition = _partition_of(key, entry, by_name[entry.name], partitions, expected)
        parts[key] = entry.stored if partition is None else StoredPart(entry.stored, partition)
    return parts


def _partition_of(
    key: str,
    entry: Target,
    of_one_name: list[Target],
    partitions: dict[str, Partition],
    expected: dict[str, torch.Tensor],
) -> Partition | None:
    """Returns the part of a stored weight that this rank reads, or None for the whole weight. `expected`: this rank's
    weights. Raises ValueError for a conversion that needs the whole weight."""
    partition = partitions.get(entry.name)
    converter = entry.converter
    if converter is None or partition is None:
        return partition
    first, *further = converter.operations
    if isinstance(first, Concatenate) and not further:
        sources = sorted(of_one_name, key=lambda source: converter.source_patterns.index(source.pattern))
        sizes = [source.stored.get_shape()[partition.dim] for source in sources]
        index = sources.index(entry)
        return partition.within(sum(sizes[:index]), sum(sizes[: index + 1]))
    if isinstance(first, Chunk | Split) and not further:
        targets = converter.target_patterns
        names = [entry.name.replace(targets[0], target) for target in targets]
        return joined([partitions[name] for name in names])
    if isinstance(first, Transpose) and not further:
        return _before_transposition(partition, first, entry.stored.get_shape(), expected[entry.name].shape)
    if all(isinstance(operation, MergeModulelist | Concatenate) for operation in converter.operations):
        return partition
    raise ValueError(f"{key}: a weight that {converter.operations} convert cannot be loaded in parts")


def _before_transposition(
    partition: Partition, transposition: Transpose, stored: Sequence[int], own: Sequence[int]
) -> Partition:
    """Returns the partition of a `stored` weight that transformers transposes unless it has the model's shape. `own`:
    the shape of this rank's part in the model."""
    whole = [partition.full if dim == partition.dim + len(own) else size for dim, size in enumerate(own)]
    if list(stored) == whole:
        return partition
    one, other = transposition.dim0 - len(own), transposition.dim1 - len(own)
    return partition.on({one: other, other: one}.get(partition.dim, partition.dim))
