"""LoRA adapters as PEFT saves them, with random weights, and transformers' models with these merged in."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

PREFIX = "base_model.model."


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Those of the language model's layers, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name and "vision" not in name and "visual" not in name
    }


def save_adapter(
    folder: Path,
    model: PreTrainedModel,
    *,
    seed: int,
    rank: int = 4,
    targets: Callable[[str], bool] = lambda name: True,
    spread: float = 1.0,
    **settings: Any,
) -> Path:
    """An adapter of the layers of `model` whose names are in `targets`. Its deltas are about `spread` times as large as
    weights of 1 / sqrt(in_features). A `rank_pattern` of the settings is followed."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, linear in linear_layers(model).items():
        if targets(name):
            own = of_module(settings.get("rank_pattern", {}), name, rank)
            a = torch.randn(own, linear.in_features, generator=generator) * linear.in_features**-0.5
            b = torch.randn(linear.out_features, own, generator=generator) * spread * own**-0.5 / 2
            tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    assert tensors
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    # The fields that PEFT writes, with its defaults.
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in linear_layers(model)}),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


def of_module(patterns: dict[str, int], name: str, default: int) -> int:
    """What PEFT takes for a module: the value of the first pattern that the end of its name matches."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model itself, of whose weights each is now W + scale * B A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, linear in linear_layers(model).items():
        if f"{PREFIX}{name}.lora_A.weight" in tensors:
            rank = of_module(config["rank_pattern"], name, config["r"])
            alpha = of_module(config["alpha_pattern"], name, config["lora_alpha"])
            scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
            a, b = (tensors[f"{PREFIX}{name}.lora_{half}.weight"] for half in "AB")
            linear.weight.data += scale * (b @ a)
    return model
