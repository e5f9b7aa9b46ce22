"""Quantizes a checkpoint in each form that GPTQModel publishes. An environment with GPTQModel runs this.

`python gptq_model.py SOURCE TARGET` writes TARGET/FORM/quantized, and as TARGET/FORM/weights.safetensors the linear
layers' weights that GPTQModel makes of that."""

import os
from pathlib import Path

os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # on two cores it takes one by default, and then refuses to start

import torch
from every_form import write_every_form
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

FORMS = {
    "GPTQ, 4 bits": {"bits": 4},
    "GPTQ, 8 bits": {"bits": 8},
    "GPTQ, ordered columns": {"bits": 4, "desc_act": True},
    "GPTQ, second version": {"bits": 4, "format": "gptq_v2"},
    "AWQ": {"bits": 4, "quant_method": "awq", "format": "gemm", "sym": False},
}


def quantize(form: str, source: Path, target: Path) -> None:
    model = GPTQModel.load(str(source), QuantizeConfig(group_size=32, device="cpu", **FORMS[form]))
    conversations = [[{"role": "user", "content": f"Which number is {i}? " * 8}] for i in range(16)]
    model.quantize(conversations, batch_size=1)
    model.save(str(target))


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    backend = BACKEND.AWQ_TORCH if folder.parent.name == "AWQ" else BACKEND.TORCH
    model = GPTQModel.load(str(folder), backend=backend, device="cpu")
    layers = model.model.model.language_model.named_modules()
    return {name: weight_of(layer) for name, layer in layers if hasattr(layer, "qweight")}


@torch.inference_mode()
def weight_of(layer: torch.nn.Module) -> torch.Tensor:
    return layer(torch.eye(layer.in_features, dtype=layer.scales.dtype)).T.contiguous()


write_every_form(FORMS, quantize, dequantized)
