"""Checkpoints whose linear layers are published in 8 or 4 bits: AWQ, GPTQ, compressed-tensors and FP8.

A layer's tensors stand for numbers with a scale, and optionally a zero, for each group of a row: weight = (number -
zero) * scale. The formats differ in the order of bits only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from raylens.cpu_kernels.packed_weight import UNIT, Form, QuantizedRows, WeightLayout

Settings = Mapping[str, Any]
"""`quantization_config` of a config.json."""

_METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The places of eight columns in AWQ's words of 32 bits, by four bits each."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By their names in safetensors' files."""
_FORMS: dict[int, Form] = {4: "int4", 8: "int8"}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A quantized weight in a file, (out_features, in_features).

    `read`: returns the rows from one index to another. `groups`: the group of each number of a row, (in_features,), if
    groups are not consecutive; None: they are. `dtype`: of the model that was quantized."""

    shape: tuple[int, int]
    form: Form
    group_size: int
    has_zeros: bool
    read: Callable[[int, int], QuantizedRows]
    groups: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def layout(self) -> WeightLayout | None:
        """Returns the kernels' layout of the same numbers, or None if they have none."""
        is_regular = self.group_size % UNIT == 0 and self.shape[1] % UNIT == 0
        if self.groups is not None or not is_regular or (self.form == "float8" and self.has_zeros):
            return None
        return WeightLayout(*self.shape, self.form, self.group_size, self.has_zeros)

    def dequantized(self, start: int, stop: int) -> torch.Tensor:
        """Returns rows as (stop - start, in_features), float32."""
        rows = self.read(start, stop)
        numbers = rows.numbers.view(torch.float8_e4m3fn) if self.form == "float8" else rows.numbers
        groups = torch.arange(self.shape[1]) // self.group_size if self.groups is None else self.groups
        weight = numbers.float()
        if rows.zeros is not None:
            weight -= rows.zeros.float()[:, groups]
        return weight * rows.scales.float()[:, groups]

    # The rest makes it a weight that transformers' loader reads.

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.dequantized(0, self.shape[0])[index]


def take_quantization(config: PreTrainedConfig) -> Settings | None:
    """Removes the settings of quantized weights from `config`, because transformers would otherwise want the libraries
    that wrote them. Returns them, or None. Raises ValueError for an unsupported method."""
    found: Settings | None = None
    for one in (config.get_text_config(), config):
        if (own := getattr(one, "quantization_config", None)) is not None:
            del one.quantization_config
            found = own if isinstance(own, Mapping) else own.to_dict()
    if found is not None and found.get("quant_method") not in _METHODS:
        supported = ", ".join(_METHODS)
        raise ValueError(
            f"weights quantized by {found.get('quant_method')!r} are not supported: take one of {supported}"
        )
    return found


def find_quantized(slices: Mapping[str, Any], settings: Settings) -> tuple[dict[str, Any], dict[str, QuantizedWeight]]:
    """Divides the weights of files into plain ones and quantized ones, both by the keys that plain ones have.

    Raises ValueError for weights in a form that is not supported."""
    plain: dict[str, Any] = dict(slices)
    quantized: dict[str, QuantizedWeight] = {}
    for key in slices:
        stem, _, leaf = key.rpartition(".")
        tensors = _Tensors(stem, slices)
        weight: QuantizedWeight | None = None
        if leaf == "qweight":
            weight = _awq(tensors) if settings["quant_method"] == "awq" else _gptq(tensors, settings)
        elif leaf == "weight_packed":
            weight = _packed(tensors)
        elif leaf == "weight" and slices[key].get_dtype() in ("F8_E4M3", "I8"):
            weight = _bytes(tensors, settings)
        if weight is not None:
            quantized[f"{stem}.weight"] = weight
            for name in tensors.used:
                plain.pop(f"{stem}.{name}", None)
    dtypes = [DTYPES.get(one.get_dtype(), torch.float32) for one in plain.values() if len(one.get_shape()) > 1]
    dtype = max(dtypes, key=dtypes.count, default=torch.float32)
    return plain, {key: replace(weight, dtype=dtype) for key, weight in quantized.items()}


class _Tensors:
    """The tensors of a layer. `used`: the names that were asked for."""

    def __init__(self, stem: str, slices: Mapping[str, Any]) -> None:
        self._stem, self._slices = stem, slices
        self.used: set[str] = set()

    def find(self, *names: str) -> Any:
        """Returns the first tensor of these names, unread, or None."""
        self.used |= set(names)
        return next((found for name in names if (found := self._slices.get(f"{self._stem}.{name}")) is not None), None)

    def get(self, *names: str) -> Any:
        if (found := self.find(*names)) is None:
            raise ValueError(f"{self._stem} has no {' or '.join(names)}")
        return found

    def unsupported(self, what: str) -> ValueError:
        return ValueError(f"{self._stem}: {what} is not supported")


def _awq(tensors: _Tensors) -> QuantizedWeight:
    """AWQ (Lin et al., 2023), version GEMM: `qweight` (in, out / 8), `qzeros` (groups, out / 8), `scales` (groups,
    out)."""
    numbers, zeros, scales = (tensors.get(name) for name in ("qweight", "qzeros", "scales"))
    (num_k, words), (groups, columns) = numbers.get_shape(), scales.get_shape()
    if words * 8 != columns:
        raise tensors.unsupported("AWQ of another number of bits than 4, or of another version than GEMM")

    def unpacked(stored: Any, start: int, stop: int) -> torch.Tensor:
        """Returns columns of a tensor as rows."""
        values = _unpack(stored[:, start // 8 : -(-stop // 8)], 4)[..., list(_AWQ_ORDER)]
        return values.flatten(1).T[start % 8 :][: stop - start]

    def read(start: int, stop: int) -> QuantizedRows:
        own = (unpacked(stored, start, stop) - 8 for stored in (numbers, zeros))
        return QuantizedRows(next(own).to(torch.int8), scales[:, start:stop].T, next(own).float())

    return QuantizedWeight((columns, num_k), "int4", num_k // groups, True, read)


def _gptq(tensors: _Tensors, settings: Settings) -> QuantizedWeight:
    """GPTQ (Frantar et al., 2022): `qweight` (in / per word, out), `qzeros` (groups, out / per word), `scales` (groups,
    out) and `g_idx` (in,), the group of each k."""
    bits = settings["bits"]
    if bits not in _FORMS:
        raise tensors.unsupported(f"GPTQ of {bits} bits")
    numbers, zeros, scales, index = (tensors.get(name) for name in ("qweight", "qzeros", "scales", "g_idx"))
    per_word, middle = 32 // bits, 2 ** (bits - 1)
    (words, columns), groups = numbers.get_shape(), scales.get_shape()[0]
    num_k = words * per_word
    group_size = num_k if settings.get("group_size", -1) in (-1, None) else settings["group_size"]
    # The first version of the format stores each zero less one.
    shift = middle - (0 if settings.get("checkpoint_format") == "gptq_v2" else 1)
    all_zeros = _unpack(zeros[...], bits).flatten(1)[:, :columns] - shift  # (groups, out)
    has_zeros = bool(all_zeros.any())
    own_groups = index[...].long()
    is_regular = torch.equal(own_groups, torch.arange(num_k) // group_size)

    def read(start: int, stop: int) -> QuantizedRows:
        values = _unpack(numbers[:, start:stop].T, bits).flatten(1) - middle
        own_zeros = all_zeros[:, start:stop].T.float() if has_zeros else None
        return QuantizedRows(values.to(torch.int8), scales[:, start:stop].T, own_zeros)

    assert groups == -(-num_k // group_size), (groups, num_k, group_size)
    return QuantizedWeight(
        (columns, num_k), _FORMS[bits], group_size, has_zeros, read, None if is_regular else own_groups
    )


def _packed(tensors: _Tensors) -> QuantizedWeight:
    """compressed-tensors, pack-quantized: `weight_packed` (out, in / per word), `weight_scale` (out, groups),
    `weight_zero_point` (out / per word, groups) and `weight_g_idx` (in,), the last two optional."""
    numbers, shape, scales = (tensors.get(name) for name in ("weight_packed", "weight_shape", "weight_scale"))
    zeros, index = tensors.find("weight_zero_point"), tensors.find("weight_g_idx")
    columns, num_k = map(int, shape[...].tolist())
    bits = 32 * numbers.get_shape()[1] // num_k
    if bits not in _FORMS or num_k % (32 // bits) or columns % (32 // bits):
        raise tensors.unsupported(f"a packed weight of {bits} bits, {columns} x {num_k}")
    middle = 2 ** (bits - 1)
    all_zeros = None if zeros is None else _unpack(zeros[...].T, bits).flatten(1).T - middle  # (out, groups)
    own_groups = None if index is None else index[...].long()

    def read(start: int, stop: int) -> QuantizedRows:
        values = _unpack(numbers[start:stop], bits).flatten(1) - middle
        own_zeros = None if all_zeros is None else all_zeros[start:stop].float()
        return QuantizedRows(values.to(torch.int8), scales[start:stop], own_zeros)

    group_size = num_k // scales.get_shape()[1]
    if own_groups is not None and torch.equal(own_groups, torch.arange(num_k) // group_size):
        own_groups = None
    return QuantizedWeight((columns, num_k), _FORMS[bits], group_size, zeros is not None, read, own_groups)


def _bytes(tensors: _Tensors, settings: Settings) -> QuantizedWeight:
    """A byte for each number, int8 or E4M3: `weight` (out, in), with a scale for all, for each row, for each group of a
    row, or for each block of rows and columns."""
    numbers, scales = tensors.get("weight"), tensors.get("weight_scale", "weight_scale_inv")
    zeros = tensors.find("weight_zero_point")
    tensors.find("input_scale", "activation_scale", "input_zero_point")  # of activations, which stay in float32
    columns, num_k = numbers.get_shape()
    form: Form = "float8" if numbers.get_dtype() == "F8_E4M3" else "int8"
    all_scales = scales[...].float()
    all_scales = all_scales.reshape(1, 1) if all_scales.numel() == 1 else all_scales.view(len(all_scales), -1)
    block = settings.get("weight_block_size") or _block_structure(settings)
    height = 1 if len(all_scales) == columns else block[0] if block and len(all_scales) > 1 else columns
    width = num_k if all_scales.shape[1] == 1 else block[1] if block else num_k // all_scales.shape[1]

    def read(start: int, stop: int) -> QuantizedRows:
        values = numbers[start:stop]
        own_zeros = None if zeros is None else zeros[start:stop].float()
        rows = torch.arange(start, stop) // height
        return QuantizedRows(values.view(torch.uint8 if form == "float8" else torch.int8), all_scales[rows], own_zeros)

    return QuantizedWeight((columns, num_k), form, width, zeros is not None, read)


def _block_structure(settings: Settings) -> list[int] | None:
    """Returns the block of compressed-tensors, (rows, columns), or None."""
    groups = settings.get("config_groups", {}).values()
    found = [(group.get("weights") or {}).get("block_structure") for group in groups]
    return next((block for block in found if block), None)


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the unsigned numbers of words of 32 bits, the lowest bits first, (..., per word)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: torch.Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers
