"""The weights of the adapters in memory, and the linear layers that apply them.

The adapters of a layer are concatenated, as a single adapter of rank `max_loras` * `max_lora_rank`. A mask limits each
row of a step to its own adapter. A layer thus costs two more products, for any number of adapters in a step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from raylens.llm.host_values import send
from raylens.llm.lora.adapter import LinearShape, LoraDelta
from raylens.llm.lora.request import NO_SLOT
from raylens.modeling.onednn_linear import OneDnnLinear
from raylens.modeling.packed_linear import KernelLinear


@dataclass(slots=True)
class ActiveAdapters:
    """The adapters of the running step. `slots`: of its rows. `ranks`: the range of their weights. `is_foreign`:
    (num_rows, number of ranks) bool, True where a weight belongs to another adapter than the row's; None: nowhere."""

    slots: frozenset[int] = frozenset()
    num_rows: int = 0
    ranks: slice = field(default_factory=lambda: slice(0))
    is_foreign: torch.Tensor | None = None


class LoraLinear(nn.Module):
    """Wraps a linear layer of any kind, and adds the delta of each row's adapter."""

    def __init__(self, base: nn.Module, a: torch.Tensor, b: torch.Tensor, active: ActiveAdapters) -> None:
        """`a` (ranks of all slots, in_features) and `b` (ranks of all slots, out_features): zeros."""
        super().__init__()
        self.base = base
        self.a, self.b = a, b
        self.active = active
        self.used_slots: set[int] = set()
        # The slices of the last step: slicing costs as much as the product.
        self._ranks = slice(0)
        self._parts = self.a.T, self.b

    def load(self, slot: int, ranks: slice, delta: LoraDelta | None) -> None:
        """Writes an adapter's delta to a slot, `ranks` of the weights. None: the adapter does not change this layer."""
        if slot in self.used_slots:
            self.a[ranks] = 0
            self.b[ranks] = 0
            self.used_slots.discard(slot)
        if delta is not None:
            own = slice(ranks.start, ranks.start + len(delta.a))
            self.a[own] = delta.a.to(self.a)
            self.b[own] = delta.b.T.to(self.b)
            self.used_slots.add(slot)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        output: torch.Tensor = self.base(input)
        active = self.active
        if active.slots.isdisjoint(self.used_slots):
            return output
        if self._ranks != active.ranks:
            self._ranks, self._parts = active.ranks, (self.a[active.ranks].T, self.b[active.ranks])
        a, b = self._parts
        rows = input.reshape(-1, input.shape[-1])
        assert len(rows) == active.num_rows, "the layer computes other rows than the step's tokens"
        inner = rows @ a
        if active.is_foreign is not None:
            inner.masked_fill_(active.is_foreign, 0)  # not by a product: 0 * inf of another row's adapter is NaN
        return torch.addmm(output.reshape(-1, output.shape[-1]), inner, b).view_as(output)


class LoraLayers:
    """A LoraLinear for each linear layer of a decoder's layers. The decoder holds them only during a step with
    adapters, so that all other steps run unchanged."""

    def __init__(
        self,
        decoder: nn.Module,
        shapes: Mapping[str, LinearShape],
        *,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shapes`: the layers that may have adapters, by their names in the decoder, see `linear_shapes`. Other
        modules, such as packed linear layers, may have replaced them since."""
        self.max_rank = max_rank
        self.dtype = dtype
        self._device = device
        self._active = ActiveAdapters()
        self._places: list[tuple[dict[str, Any], str, LoraLinear]] = []
        self._linears: dict[str, LoraLinear] = {}
        for name, shape in shapes.items():
            owner, _, leaf = name.rpartition(".")
            modules: dict[str, Any] = decoder.get_submodule(owner)._modules
            sizes = shape.in_features, shape.out_features
            a, b = (torch.zeros(max_loras * max_rank, size, dtype=dtype, device=device) for size in sizes)
            linear = LoraLinear(modules[leaf], a, b, self._active)
            self._places.append((modules, leaf, linear))
            self._linears[_from_layers(name)] = linear
        self.shapes = {_from_layers(name): shape for name, shape in shapes.items()}
        self._layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]

    def load(self, slot: int, deltas: Mapping[str, LoraDelta]) -> None:
        """Writes an adapter to a slot that no running sequence uses. Thread-safe, even during steps: steps read only
        finite values from the slot and mask them."""
        for name, linear in self._linears.items():
            linear.load(slot, self._ranks(slot, slot + 1), deltas.get(name))

    @contextmanager
    def of(self, row_slots: torch.Tensor) -> Iterator[None]:
        """Applies adapters within this context. `row_slots`: (num_tokens,) int64 on the CPU, the slot of each row of
        the step, or NO_SLOT. At least one row has a slot."""
        self._activate(row_slots)
        # A layer's compiled code is valid without adapters only.
        compiled = [(vars(layer), forward) for layer in self._layers if (forward := vars(layer).pop("forward", None))]
        for modules, leaf, linear in self._places:
            modules[leaf] = linear
        try:
            yield
        finally:
            for modules, leaf, linear in self._places:
                modules[leaf] = linear.base
            for attributes, forward in compiled:
                attributes["forward"] = forward

    def _activate(self, row_slots: torch.Tensor) -> None:
        active = self._active
        all_slots = frozenset(row_slots.tolist())
        active.slots, active.num_rows = all_slots - {NO_SLOT}, len(row_slots)
        active.ranks = self._ranks(min(active.slots), max(active.slots) + 1)
        active.is_foreign = None
        if len(all_slots) > 1:
            owners = torch.arange(active.ranks.start, active.ranks.stop, device=self._device) // self.max_rank
            active.is_foreign = owners != send(row_slots.numpy(), self._device).unsqueeze(1)

    def _ranks(self, start: int, stop: int) -> slice:
        return slice(start * self.max_rank, stop * self.max_rank)


def linear_shapes(decoder: nn.Module) -> dict[str, LinearShape]:
    """Returns the plain or packed linear layers of the decoder's layers, by name, without experts, which see other
    rows."""
    return {
        name: LinearShape(module.in_features, module.out_features)
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear | KernelLinear | OneDnnLinear)
        and ".layers." in f".{name}"
        and ".experts." not in name
    }


def _from_layers(name: str) -> str:
    """Returns the part of a name that starts with `layers.`."""
    return name[f".{name}".index(".layers.") :]
