"""Packs the weights of linear layers and embeddings for the CPU once, at start-up.

Layers that compute in float32 go to Raylens' own kernels if they were built (`cpu_kernels`), others to oneDNN."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from raylens.cpu_kernels.huge_pages import HugePages
from raylens.cpu_kernels.library import KernelLibrary, kernel_library, why_missing
from raylens.cpu_kernels.packed_weight import DTYPES, EXACT, PAIR, ROWS_AT_ONCE, UNIT, PackedWeight, WeightLayout
from raylens.cpu_kernels.quantize import quantize
from raylens.cpu_kernels.threads import on_all_cores
from raylens.modeling.load_progress import told_progress
from raylens.modeling.mapped_files import MappedFiles
from raylens.modeling.onednn_linear import OneDnnLinear, onednn_dtypes
from raylens.modeling.quantized_checkpoint import QuantizedWeight
from raylens.modeling.stored_weights import QuantizedLinear
from raylens.modeling.submodules import submodules

Precision = Literal["bfloat16", "float16", "int8", "int4"]
"""Of weights in memory, where it is not that of their file."""
_GROUP_SIZES = {"int8": 128, "int4": 64}
_STORED_ROWS_AT_ONCE = 512
_ROW_PARTS = {torch.bfloat16: 1, torch.float16: 2}
"""The numbers of bfloat16 that have the bits of a number of each dtype; see `PackedWeight`."""


class KernelLinear(nn.Module):
    """A Linear with this packed weight and bias, (out_features,) float32."""

    stored: torch.Tensor | None = None
    """See `stored_products`."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.layout.out_features, weight.layout.in_features
        self.packed_weight = weight
        self.bias = None if bias is None else bias.detach().float().contiguous()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Linear gives it
        return self.packed_weight.product(input, self.bias)


class PackedEmbedding(nn.Module):
    """An Embedding with this packed weight, (num_embeddings, dim), float32, whose rows are multiplied by `scale`."""

    stored: torch.Tensor | None = None

    def __init__(self, weight: PackedWeight, scale: float) -> None:
        super().__init__()
        self.packed_weight, self.scale = weight, scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that nn.Embedding gives it
        return self.packed_weight.rows(input, self.scale)


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> nn.Module:
    """Returns a packed Linear with this weight, (out_features, in_features), and bias. It computes in `dtype`, one of
    `packable_dtypes`."""
    if not has_kernel_layers(dtype):
        return OneDnnLinear(weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype))
    return KernelLinear(next(_packed_one_by_one([_Source.of(weight, None, is_exact=True)], MappedFiles())), bias)


def pack_linear_layers(
    model: nn.Module,
    dtype: torch.dtype,
    is_included: Callable[[str], bool] = lambda name: True,
    precision_of: Callable[[str], Precision | None] = lambda name: None,
    is_exact: Callable[[str], bool] = lambda name: True,
    embeddings: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Replaces the linear layers of a model that are on the CPU, in place. The new ones compute in `dtype`, one of
    `packable_dtypes`.

    `is_included`: returns whether to replace the layer of a name. The rest needs Raylens' kernels. `precision_of`:
    returns the precision of the weight of a name, or None to keep the stored one. `is_exact`: returns whether the layer
    of a name computes in float32 on every processor. Others may round their inputs, as the library for AMX does, to the
    bits that the weight's dtype has. `embeddings`: by name, embeddings to replace, too, with the factor of their rows.
    A layer and an embedding of the same weight share the packed one."""
    layers = {name: module for name, module in submodules(model) if is_included(name) and _is_packable(module)}
    if not has_kernel_layers(dtype):
        if precision := next(filter(None, map(precision_of, layers)), None):
            raise ValueError(f"weights in {precision} need Raylens' kernels for the CPU: {why_missing()}")
        for name, module in layers.items():
            linear = module.dequantized() if isinstance(module, QuantizedLinear) else module
            model.set_submodule(name, packed_linear(linear.weight, linear.bias, dtype))
        return
    files = MappedFiles()
    sources, all_names = _sources(model, [*layers, *embeddings], precision_of, is_exact, files)
    del layers  # each stored weight is freed as soon as it is packed
    all_stored = [source.to_compare_with(files) for source in sources]
    for packed, names, stored in zip(_packed_one_by_one(sources, files), all_names, all_stored, strict=True):
        for name in names:
            is_embedding = name in embeddings
            old: Any = model.get_submodule(name)
            new = PackedEmbedding(packed, embeddings[name]) if is_embedding else KernelLinear(packed, old.bias)
            new.stored = stored
            model.set_submodule(name, new)


def _sources(
    model: nn.Module,
    names: Iterable[str],
    precision_of: Callable[[str], Precision | None],
    is_exact: Callable[[str], bool],
    files: MappedFiles,
) -> tuple[list["_Source"], list[list[str]]]:
    """Returns the weights of the named modules, and for each the modules that share it."""
    places: dict[Any, list[str]] = {}
    for name in names:
        places.setdefault(model.get_submodule(name).weight, []).append(name)
    sources = []
    for weight, sharing in places.items():
        sources.append(_Source.of(weight, precision_of(sharing[0]), is_exact=any(map(is_exact, sharing))))
        if isinstance(weight, torch.Tensor):
            files.release(weight)  # float32 was read, to see whether it is bfloat16
    return sources, list(places.values())


@dataclass(frozen=True, slots=True)
class _Source:
    """The numbers of a weight, and how they are packed."""

    weight: torch.Tensor | QuantizedWeight
    layout: WeightLayout
    row_parts: int

    @classmethod
    def of(cls, weight: torch.Tensor | QuantizedWeight, precision: Precision | None, *, is_exact: bool) -> "_Source":
        if isinstance(weight, QuantizedWeight):
            layout = weight.layout or WeightLayout(*weight.shape, "float32")
            return cls(weight, layout, EXACT if is_exact else _ROW_PARTS.get(weight.dtype, EXACT))
        weight = weight.detach()
        dtype = getattr(torch, precision) if precision == "bfloat16" or precision == "float16" else weight.dtype
        if dtype == torch.bfloat16 and weight.shape[1] % PAIR:
            weight = weight.to(dtype)  # its layout, float32, would keep the bits that are to go
        parts = EXACT if is_exact else _ROW_PARTS.get(dtype, EXACT)
        return cls(weight, _layout(weight, precision), parts)

    def to_compare_with(self, files: MappedFiles) -> torch.Tensor | None:
        """Returns the weight if it is to be quantized and its numbers stay in `files`, at no cost."""
        if isinstance(self.weight, QuantizedWeight) or not self.layout.group_size or not files.hold(self.weight):
            return None
        return self.weight

    def write(self, library: KernelLibrary, packed: PackedWeight, start: int, stop: int) -> torch.Tensor | None:
        """Writes rows of the weight. Returns their memory if they were not read from a file just now."""
        if isinstance(self.weight, QuantizedWeight):
            if self.weight.layout is None:
                packed.write(self.weight.dequantized(start, stop), start)
            else:
                packed.write_quantized(self.weight.read(start, stop), start)
            return None
        rows = self.weight[start:stop]
        if self.layout.group_size:
            packed.write_quantized(quantize(library, rows, self.layout), start)
        else:
            packed.write(rows, start)
        return rows


def _layout(weight: torch.Tensor, precision: Precision | None) -> WeightLayout:
    out_features, in_features = weight.shape
    unit = {"float16": 1, "bfloat16": PAIR}.get(precision or "", UNIT)
    if precision is None or in_features % unit:
        return WeightLayout.of(weight)
    return WeightLayout(out_features, in_features, precision, _GROUP_SIZES.get(precision, 0))


def _packed_one_by_one(sources: list[_Source], files: MappedFiles) -> Iterator[PackedWeight]:
    """Yields the packed weights of `sources`, and removes each from the list before."""
    library: KernelLibrary = kernel_library()  # type: ignore[assignment]
    sizes = [source.layout.num_bytes(library) for source in sources]
    pages = HugePages(sizes)
    with told_progress(), tqdm(total=sum(sizes), desc="Packing weights", unit="B", unit_scale=True) as bar:
        for size in sizes:
            source = sources.pop(0)
            packed, num_rows = (
                PackedWeight(library, source.layout, pages, row_parts=source.row_parts),
                source.layout.out_features,
            )
            for start in range(0, num_rows, ROWS_AT_ONCE):
                stop = min(start + ROWS_AT_ONCE, num_rows)
                with on_all_cores():
                    rows = source.write(library, packed, start, stop)
                if rows is not None:
                    files.release(rows)
                bar.update(size * (stop - start) // num_rows)
            del source
            yield packed


def _is_packable(module: Any) -> TypeGuard[nn.Linear | QuantizedLinear]:
    if type(module) is QuantizedLinear:
        return True
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype in DTYPES


def row_parts(attention: nn.Module) -> int:
    """Returns how the attention of a module may round: as the packed layers in it do, see `PackedWeight`."""
    layers = (module for module in attention.modules() if isinstance(module, KernelLinear))
    return max((layer.packed_weight.row_parts for layer in layers), default=EXACT)


@contextmanager
def exact_products(model: nn.Module) -> Iterator[None]:
    """Lets the packed layers of a model, and the attention between them, compute in float32, whatever they may
    round."""
    weights = {module.packed_weight for module in model.modules() if isinstance(module, KernelLinear)}
    parts = [(weight, weight.row_parts) for weight in weights]
    try:
        for weight in weights:
            weight.row_parts = EXACT
        yield
    finally:
        for weight, own in parts:
            weight.row_parts = own


@contextmanager
def stored_products(model: nn.Module) -> Iterator[None]:
    """Lets the packed layers of a model whose weights `pack_linear_layers` quantized compute with the stored weights,
    in float32. Lets go of these at the end."""
    files, layers = MappedFiles(), _quantized_layers(model)
    try:
        for layer in layers:
            layer.forward = partial(_stored_product, layer, files)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            del layer.forward, layer.stored


def has_stored_products(model: nn.Module) -> bool:
    """Returns whether a model has quantized weights, and the stored weights of all of them are in mapped files."""
    layers = _quantized_layers(model)
    return bool(layers) and all(layer.stored is not None for layer in layers)


def _quantized_layers(model: nn.Module) -> list[KernelLinear | PackedEmbedding]:
    packed = (one for one in model.modules() if isinstance(one, KernelLinear | PackedEmbedding))
    return [one for one in packed if one.packed_weight.layout.group_size]


def _stored_product(layer: KernelLinear | PackedEmbedding, files: MappedFiles, given: torch.Tensor) -> torch.Tensor:
    assert layer.stored is not None
    if isinstance(layer, PackedEmbedding):
        return F.embedding(given, layer.stored).float() * layer.scale
    product = given.new_empty(*given.shape[:-1], layer.out_features)
    columns = torch.split(product, _STORED_ROWS_AT_ONCE, dim=-1)
    with on_all_cores():
        for rows, own in zip(torch.split(layer.stored, _STORED_ROWS_AT_ONCE), columns, strict=True):
            own.copy_(F.linear(given, rows.float()))
            files.release(rows)
    return product if layer.bias is None else product + layer.bias


def has_kernel_layers(dtype: torch.dtype) -> bool:
    """Returns whether packed layers of this dtype run on Raylens' own kernels."""
    return dtype == torch.float32 and kernel_library() is not None


def packable_dtypes() -> tuple[torch.dtype, ...]:
    """Returns the dtypes with packed layers on this processor."""
    own = (torch.float32,) if has_kernel_layers(torch.float32) else ()
    return tuple(dict.fromkeys(own + onednn_dtypes()))
