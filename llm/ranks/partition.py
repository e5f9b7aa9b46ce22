"""Describes the part of a weight that a rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Partition:
    """The part of one weight that a rank holds: of the `full` entries of dimension `dim` (negative) the half-open
    `ranges`, concatenated and followed by `padding` zeros."""

    dim: int
    full: int
    ranges: tuple[tuple[int, int], ...]
    padding: int = 0

    @property
    def length(self) -> int:
        """Returns the number of entries on this rank, padding included."""
        return sum(stop - start for start, stop in self.ranges) + self.padding

    def on(self, dim: int) -> "Partition":
        """Returns the partition with the same entries on another dimension, such as a bias's only dimension for its
        weight's rows."""
        return replace(self, dim=dim)

    def within(self, start: int, stop: int) -> "Partition":
        """Returns the partition of the entries [start, stop), stored as a weight of their own. The last entries keep
        the padding."""
        clipped = ((max(first, start), min(last, stop)) for first, last in self.ranges)
        own = tuple((first - start, last - start) for first, last in clipped if first < last)
        return Partition(self.dim, stop - start, own or ((0, 0),), self.padding if stop == self.full else 0)

    def of_shape(self, shape: tuple[int, ...]) -> "Partition":
        """Returns the partition of a stored weight of `shape`: the whole weight, or one of two `joined` equal halves.
        Raises ValueError for any other shape."""
        size = shape[self.dim]
        if size == self.full:
            return self
        if len(self.ranges) == 2 and 2 * size == self.full:
            return replace(self, full=size, ranges=self.ranges[:1])
        raise ValueError(f"a weight of shape {shape} is stored, {self.full} on dimension {self.dim} were expected")

    def take(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns a copy of this rank's part of a whole weight."""
        return self.read(weight, weight.ndim)

    def read(self, stored: Any, ndim: int) -> torch.Tensor:
        """Returns a copy of this rank's part of `stored`, reading only that part. `stored` has `ndim` dimensions and
        returns a tensor for an index, like a weight in a file."""
        before, after = [slice(None)] * (ndim + self.dim), [slice(None)] * (-1 - self.dim)
        # Concatenated even if it is one, because a view would keep the whole weight's memory.
        whole = torch.cat([stored[(*before, slice(start, stop), *after)] for start, stop in self.ranges], self.dim)
        return nn.functional.pad(whole, [0, 0] * len(after) + [0, self.padding]) if self.padding else whole


def joined(partitions: Sequence[Partition]) -> Partition:
    """Returns the partition of the concatenated weights of `partitions`."""
    ranges: list[tuple[int, int]] = []
    full = 0
    for partition in partitions:
        assert partition.padding == 0
        ranges += [(start + full, stop + full) for start, stop in partition.ranges]
        full += partition.full
    return Partition(partitions[0].dim, full, tuple(ranges))


def even(name: str, size: int, dim: int, rank: int, world_size: int) -> Partition:
    """Returns this rank's equal part. Raises ValueError if the number of ranks does not divide `size`."""
    if size % world_size:
        raise ValueError(f"{name}: {size} cannot be divided by {world_size} ranks")
    length = size // world_size
    return Partition(dim, size, ((rank * length, (rank + 1) * length),))


def with_padding(size: int, dim: int, rank: int, world_size: int) -> Partition:
    """Returns this rank's equal part. Zeros pad the last ranks' parts."""
    length = -(-size // world_size)
    start, stop = (min(size, bound * length) for bound in (rank, rank + 1))
    return Partition(dim, size, ((start, stop),), length - (stop - start))


def replicated_kv(name: str, num_kv_heads: int, head_dim: int, rank: int, world_size: int) -> Partition:
    """Returns this rank's rows of the key or value heads. With fewer heads than ranks, ranks share heads. Raises
    ValueError if neither number, of heads or ranks, divides the other."""
    if world_size % num_kv_heads and num_kv_heads % world_size:
        raise ValueError(f"{name}: {num_kv_heads} key/value heads cannot be divided by {world_size} ranks")
    per_rank = max(1, num_kv_heads // world_size)
    start = rank * num_kv_heads // world_size * head_dim
    return Partition(-2, num_kv_heads * head_dim, ((start, start + per_rank * head_dim),))
