"""Layers with one rank's part of a weight. Parameter names are the same as in the replaced layers.

A column-parallel layer needs no class: it is a plain `nn.Linear` with fewer output features."""

from typing import TypeVar

import torch
from torch import nn

from raylens.llm.ranks.parallel import ProcessGroup

L = TypeVar("L", bound=nn.Linear)


def linear_of(cls: type[L], weight: torch.Tensor, bias: torch.Tensor | None) -> L:
    """Returns a layer of `cls` with this `weight`, (out_features, in_features), and `bias`, without copying them."""
    layer = cls(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


class RowParallelLinear(nn.Linear):
    """Holds some columns of the weight and returns the sum of all ranks' products. With `split_input` the layer takes
    its rank's part of a whole input. The bias is whole and is added once, to the sum."""

    group: ProcessGroup
    split_input = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        if self.split_input:
            start = self.group.rank * self.in_features
            input = input[..., start : start + self.in_features]  # noqa: A001
        output: torch.Tensor = self.group.all_reduce(nn.functional.linear(input, self.weight))
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Linear):
    """Holds some rows of the weight and returns the concatenated outputs of all ranks, cut to `num_outputs`."""

    group: ProcessGroup
    num_outputs: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        gathered: torch.Tensor = self.group.all_gather(super().forward(input))
        return gathered.movedim(0, -2).flatten(-2)[..., : self.num_outputs]


def shard_embedding(embedding: nn.Embedding, weight: torch.Tensor, start: int, stop: int, group: ProcessGroup) -> None:
    """Reduces `embedding` to `weight`: the rows [start, stop) of its table, possibly padded. Lookups sum over all
    ranks, so results stay the same."""
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    embedding.num_embeddings = weight.shape[0]
    embedding.padding_idx = None  # refers to the whole table, and matters in training only
    # The layer keeps its class, because some models scale the result in an embedding class of their own.
    lookup = embedding.forward

    def forward(token_ids: torch.Tensor) -> torch.Tensor:
        outside = (token_ids < start) | (token_ids >= stop)
        rows = lookup((token_ids - start).masked_fill(outside, 0))
        summed: torch.Tensor = group.all_reduce(rows.masked_fill(outside.unsqueeze(-1), 0))
        return summed

    embedding.forward = forward  # type: ignore[assignment, method-assign]
