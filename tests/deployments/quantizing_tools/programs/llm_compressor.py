"""Quantizes a checkpoint in each form that llm-compressor publishes. An environment with llm-compressor runs this.

`python llm_compressor.py SOURCE TARGET` writes TARGET/FORM/quantized, and as TARGET/FORM/weights.safetensors the linear
layers' weights that transformers makes of that."""

import shutil
from pathlib import Path

import torch
from datasets import Dataset
from every_form import write_every_form
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoConfig, AutoModelForImageTextToText, CompressedTensorsConfig

LANGUAGE_ONLY = {"targets": "Linear", "ignore": ["re:.*lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]}
RECIPES = {
    "W4A16": GPTQModifier(scheme="W4A16", **LANGUAGE_ONLY),
    "W4A16_ASYM": GPTQModifier(scheme="W4A16_ASYM", **LANGUAGE_ONLY),
    **{
        scheme: QuantizationModifier(scheme=scheme, **LANGUAGE_ONLY)
        for scheme in ("W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK")
    },
}


def quantize(form: str, source: Path, target: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.bfloat16)
    ids = torch.randint(3, 90, (8, 64), generator=torch.Generator().manual_seed(0)).tolist()
    samples = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 64] * 8})
    oneshot(model=model, dataset=samples, num_calibration_samples=len(samples), max_seq_length=64, recipe=RECIPES[form])
    shutil.copytree(source, target)
    (target / "model.safetensors").unlink()
    model.save_pretrained(target, save_compressed=True)


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    config = AutoConfig.from_pretrained(folder)
    # The file names modules as it names weights, which transformers renames.
    config.quantization_config["ignore"] = LANGUAGE_ONLY["ignore"]
    model = AutoModelForImageTextToText.from_pretrained(
        folder, config=config, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    layers = model.model.language_model.named_modules()
    return {name: layer.weight.contiguous() for name, layer in layers if isinstance(layer, torch.nn.Linear)}


write_every_form(RECIPES, quantize, dequantized)
