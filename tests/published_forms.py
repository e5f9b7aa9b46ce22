"""Checkpoints in the quantized forms that people publish, written by hand from plain ones.

A form's function takes a weight, (out, in), and returns the tensors of its file by the last part of their names, and
the float32 numbers that they stand for, each by its own formula."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]

GROUP = 16
_AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
"""The columns of a word of eight, from its lowest four bits."""


def grouped(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned numbers (out, in), and scales and zeros (out, groups), between a group's extremes."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-4).half().float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    numbers = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return numbers.flatten(1).int(), scales, zeros.int()


def dequantized(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return (numbers - zeros[:, groups]).float() * scales[:, groups]


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The last axis in words of 32 bits, the first number in the lowest bits."""
    parts = numbers.long().reshape(*numbers.shape[:-1], -1, 32 // bits) << torch.arange(0, 32, bits)
    return parts.sum(-1).to(torch.uint32).view(torch.int32)


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales, zeros = grouped(weight, 4)
    ordered = [words(one.T.reshape(one.shape[1], -1, 8)[..., _AWQ_COLUMNS].flatten(-2), 4) for one in (numbers, zeros)]
    tensors = {"qweight": ordered[0], "qzeros": ordered[1], "scales": scales.T.half()}
    return tensors, dequantized(numbers, scales, zeros, torch.arange(weight.shape[1]) // GROUP)


def gptq(bits: int, *, is_first_version: bool, orders_columns: bool = False) -> Quantize:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        order = torch.arange(weight.shape[1])
        if orders_columns:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
        by_group, scales, zeros = grouped(weight[:, order], bits)
        numbers, groups = torch.empty_like(by_group), torch.empty_like(order)
        numbers[:, order], groups[order] = by_group, torch.arange(len(order)) // GROUP
        tensors = {
            "qweight": words(numbers, bits).T,
            "qzeros": words((zeros - int(is_first_version)).T, bits),
            "scales": scales.T.half(),
            "g_idx": groups.int(),
        }
        return tensors, dequantized(numbers, scales, zeros, groups)

    return quantize


def block_float8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    blocks = weight.view(rows // GROUP, GROUP, columns // GROUP, GROUP)
    scales = blocks.abs().amax((1, 3)) / 448
    numbers = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    spread = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * spread


def row_float8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def whole_float8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale, "input_scale": torch.ones(())}, numbers.float() * scale


def row_int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales.float()


def packed(bits: int, *, has_zeros: bool) -> Quantize:
    """compressed-tensors' W4A16 and W8A16."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scales, zeros = grouped(weight, bits)
        if not has_zeros:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        tensors = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        return tensors, dequantized(numbers, scales, zeros, torch.arange(weight.shape[1]) // GROUP)

    return quantize


_GPTQ = {"quant_method": "gptq", "group_size": GROUP}
_COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}}
FORMS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq, 4 bits": (gptq(4, is_first_version=True), _GPTQ | {"bits": 4}),
    "gptq, 8 bits": (gptq(8, is_first_version=True), _GPTQ | {"bits": 8}),
    "gptq, second version": (
        gptq(4, is_first_version=False),
        _GPTQ | {"bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "gptq, ordered columns": (
        gptq(4, is_first_version=True, orders_columns=True),
        _GPTQ | {"bits": 4, "desc_act": True},
    ),
    "compressed-tensors, W4A16": (packed(4, has_zeros=False), _COMPRESSED | {"format": "pack-quantized"}),
    "compressed-tensors, W4A16 with zeros": (packed(4, has_zeros=True), _COMPRESSED | {"format": "pack-quantized"}),
    "compressed-tensors, W8A16": (packed(8, has_zeros=False), _COMPRESSED | {"format": "pack-quantized"}),
    "compressed-tensors, W8A8": (row_int8, _COMPRESSED | {"format": "int-quantized"}),
    "compressed-tensors, FP8": (row_float8, _COMPRESSED | {"format": "float-quantized"}),
    "compressed-tensors, FP8 with one scale": (whole_float8, _COMPRESSED | {"format": "float-quantized"}),
    "fp8 in blocks": (block_float8, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
}


def publish(form: str, source: str, target: Path, is_quantized: Callable[[str], bool]) -> tuple[str, str]:
    """Writes a checkpoint in this form, and one of the same numbers in float32. `is_quantized`: by a weight's name."""
    quantize, settings = FORMS[form]
    folders = [target / "quantized", target / "dequantized"]
    weights = load_file(Path(source) / "model.safetensors")
    written: list[Tensors] = [{}, {}]
    for name, weight in weights.items():
        stem, _, leaf = name.rpartition(".")
        tensors, numbers = {leaf: weight}, weight
        if leaf == "weight" and is_quantized(stem):
            tensors, numbers = quantize(weight.float())
        written[0] |= {f"{stem}.{own}": tensor.contiguous() for own, tensor in tensors.items()}
        written[1][name] = numbers.contiguous()
    for folder, own in zip(folders, written, strict=True):
        shutil.copytree(source, folder)
        save_file(own, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folders[0] / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return str(folders[0]), str(folders[1])
