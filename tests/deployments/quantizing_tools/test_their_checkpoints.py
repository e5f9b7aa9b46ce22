"""Checkpoints that the llm-compressor and the GPTQModel of today write: their weights are those that the tool reads
itself, and the answers over HTTP equal those of `generate` over them. Each tool gets an environment of some GB."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from safetensors.torch import load_file, save_file

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import deployed_app
from raylens.modeling.quantized_checkpoint import find_quantized
from raylens.modeling.stored_weights import open_weights
from tests.environments import make_environment
from tests.exact_answers import ask, tokens_of
from tests.family_oracle import FamilyOracle
from tests.preprocess.parity import picture
from tests.small_models import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROGRAMS = Path(__file__).parent / "programs"
PACKAGES = {
    "llm_compressor": [["torch", "torchvision", "llmcompressor"]],
    # Its build wants PyTorch beside it.
    "gptq_model": [["torch>=2.14.1", "torchvision", "setuptools", "wheel"], ["--no-build-isolation", "gptqmodel"]],
}
FORMS = [
    *(("llm_compressor", form) for form in ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK")),
    *(("gptq_model", f"GPTQ, {form}") for form in ("4 bits", "8 bits", "ordered columns", "second version")),
    ("gptq_model", "AWQ"),
]
QUESTIONS: list[tuple[str, list[int]]] = [("What?", [0]), ("What?", [1]), ("And these?", [2, 3]), ("Hello", [])]
TWO_ROUNDINGS = 2**-7
"""Of a scale and of a weight to bfloat16, in which the tools compute."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    return Path(make_checkpoint("llava", tmp_path_factory.mktemp("plain"), sizes))


@pytest.fixture(scope="module")
def written(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By tool: a folder with what its program writes."""
    folders = {}
    for tool, installations in PACKAGES.items():
        folders[tool] = tmp_path_factory.mktemp(tool)
        python = make_environment(folders[tool] / "environment", *installations)
        # GPTQModel leaves a folder of logs where it runs.
        subprocess.run([python, PROGRAMS / f"{tool}.py", plain, folders[tool]], check=True, cwd=folders[tool])
    return folders


def numbers_of(quantized: Path) -> dict[str, torch.Tensor]:
    """All weights by the file's names, quantized ones as the float32 numbers that they stand for."""
    settings = json.loads((quantized / "config.json").read_text())["quantization_config"]
    plain, found = find_quantized(open_weights(map(str, quantized.glob("*.safetensors")), "pread"), settings)
    return {key: weight[:].float().contiguous() for key, weight in (plain | found).items()}


@pytest.mark.parametrize(("tool", "form"), FORMS)
def test_answers_are_those_of_the_weights_that_the_tool_reads(
    tool: str, form: str, written: dict[str, Path], plain: Path, tmp_path: Path, ray_port: int
) -> None:
    quantized, dequantized = written[tool] / form / "quantized", tmp_path / "dequantized"
    numbers = numbers_of(quantized)
    theirs = load_file(written[tool] / form / "weights.safetensors")
    assert len(theirs) == 14
    for name, weight in theirs.items():
        (own,) = (numbers[key] for key in numbers if "language_model" in key and key.endswith(f"{name}.weight"))
        torch.testing.assert_close(own, weight.float(), rtol=TWO_ROUNDINGS, atol=0)

    shutil.copytree(plain, dequantized)
    save_file(numbers, dequantized / "model.safetensors", {"format": "pt"})
    oracle = FamilyOracle("llava", str(dequantized))
    config = AppConfig.model_validate({"model": str(quantized), "served_model_name": "small", "dtype": "float32"})
    with deployed_app(config, host="127.0.0.1", port=ray_port) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)
        for text, indices in QUESTIONS:
            pictures = [picture(index) for index in indices]
            assert tokens_of(ask(client, text, pictures)) == oracle.expected(text, pictures)
