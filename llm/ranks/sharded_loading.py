"""Loads a checkpoint so that each rank reads only its own part of each weight."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from raylens.llm.ranks.parallel import ProcessGroup
from raylens.llm.ranks.partition import Partition, joined
from raylens.llm.ranks.sharding import check_shapes, shard


def sharded_class(
    model_class: type[PreTrainedModel], decoder: Callable[[PreTrainedModel], nn.Module], group: ProcessGroup
) -> type[PreTrainedModel]:
    """Returns a subclass of `model_class` whose `from_pretrained` loads only this rank's part of the language half. It
    raises the errors of `shard`, and ValueError for a checkpoint that is not in safetensors and for a conversion that
    needs a whole weight."""

    class Sharded(model_class):
        # transformers calls this after it has built the model on the meta device and found the checkpoint's files. It
        # still renames keys, converts dtypes and merges experts itself.
        @staticmethod
        def _load_pretrained_model(
            model: PreTrainedModel, state_dict: dict[str, Any] | None, files: list[str], load_config: Any, **_: Any
        ) -> tuple[Any, Any]:
            if not all(file.endswith(".safetensors") for file in files):
                raise ValueError(f"tensor parallelism reads safetensors only, not {files}")
            partitions = shard(model, decoder(model), group)
            with ExitStack() as stack:
                slices: dict[str, Any] = {}
                for file in files:
                    # Not memory-mapped: reading columns of a mapped weight would load all its pages.
                    opened = stack.enter_context(safe_open(file, framework="pt", backend="pread"))
                    slices |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 - no iterator
                slices = _parts(model, slices, partitions, load_config.weight_mapping or [])
                loaded = model_class._load_pretrained_model(model, slices, None, load_config)
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


@dataclass(frozen=True, slots=True)
class _Stored:
    """A weight in a file. `name`: the model's weight that it fills, alone or as a part. `converter` and `pattern`: of
    transformers' conversion, if it has one."""

    weight: Any
    name: str
    pattern: str | None
    converter: WeightConverter | None


def _parts(
    model: PreTrainedModel, slices: dict[str, Any], partitions: dict[str, Partition], mapping: list[Any]
) -> dict[str, Any]:
    """Returns `slices` by checkpoint key, with this rank's part in place of each divided weight."""
    expected = model.state_dict()
    stored = _find_targets(model, slices, mapping, expected)
    by_name: dict[str, list[_Stored]] = {}
    for entry in stored.values():
        by_name.setdefault(entry.name, []).append(entry)
    parts: dict[str, Any] = {}
    for key, entry in stored.items():
        partition = _partition_of(key, entry, by_name[entry.name], partitions, expected)
        parts[key] = entry.weight if partition is None else StoredPart(entry.weight, partition)
    return parts


def _find_targets(
    model: PreTrainedModel, slices: dict[str, Any], mapping: list[Any], expected: dict[str, torch.Tensor]
) -> dict[str, _Stored]:
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    stored = {}
    # In transformers' own order, because some renamings depend on it.
    for key in sorted(slices, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, expected)
        converter = by_pattern[pattern] if pattern is not None and name in expected else None
        stored[key] = _Stored(slices[key], name, pattern, converter)
    return stored


def _partition_of(
    key: str,
    entry: _Stored,
    of_one_name: list[_Stored],
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
        sizes = [source.weight.get_shape()[partition.dim] for source in sources]
        index = sources.index(entry)
        return partition.within(sum(sizes[:index]), sum(sizes[: index + 1]))
    if isinstance(first, Chunk | Split) and not further:
        targets = converter.target_patterns
        names = [entry.name.replace(targets[0], target) for target in targets]
        return joined([partitions[name] for name in names])
    if isinstance(first, Transpose) and not further:
        return _before_transposition(partition, first, entry.weight.get_shape(), expected[entry.name].shape)
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
