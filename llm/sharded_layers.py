"""Layers that hold one rank's part of a weight. They keep the names of the parameters that they stand for.

A column-parallel layer needs no class: it is a plain `nn.Linear` with fewer output features.
"""

import torch
from torch import nn

from llm.parallel import ProcessGroup


def linear_of(cls: type[nn.Linear], weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A layer of `cls` with that weight, (out_features, in_features), and bias; neither is copied."""
    layer = cls(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


class RowParallelLinear(nn.Linear):
    """Holds some columns of the weight; its input is what the other layer's rank computed, or, with `split_input`,
    everything, of which it takes its own part. The bias is whole and added once, to the sum."""

    group: ProcessGroup
    split_input = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        if self.split_input:
            start = self.group.rank * self.in_features
            input = input[..., start : start + self.in_features]  # noqa: A001
        output: torch.Tensor = self.group.all_reduce(nn.functional.linear(input, self.weight))
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Linear):
    """Holds some rows of the weight and returns the outputs of all ranks, cut to `num_outputs`."""

    group: ProcessGroup
    num_outputs: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        gathered: torch.Tensor = self.group.all_gather(super().forward(input))
        return gathered.movedim(0, -2).flatten(-2)[..., : self.num_outputs]


def shard_embedding(embedding: nn.Embedding, weight: torch.Tensor, start: int, stop: int, group: ProcessGroup) -> None:
    """Makes `embedding` hold rows [start, stop) of its table, with `weight`; lookups return the same as before."""
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    embedding.num_embeddings = weight.shape[0]
    embedding.padding_idx = None  # a row of the whole table; it matters in training only
    # Models' own classes scale what they look up: the layer stays what it is, only its rows are other ones.
    lookup = embedding.forward

    def forward(token_ids: torch.Tensor) -> torch.Tensor:
        outside = (token_ids < start) | (token_ids >= stop)
        rows = lookup((token_ids - start).masked_fill(outside, 0))
        summed: torch.Tensor = group.all_reduce(rows.masked_fill(outside.unsqueeze(-1), 0))
        return summed

    embedding.forward = forward  # type: ignore[assignment, method-assign]
