"""A package with a vision plug-in, made and installed as a third party would, and a text model for it."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.preprocess.small_tokenizers import small_tokenizer

NAME = "blocks-4x4"
START, END = "<Img>", "</Img>"
PLACEHOLDER = 1  # BOS, as in MiniGPT-4's plug-in
NUM_EMBEDS = 6
HIDDEN_SIZE = 32
RAISES, WRONG_NUMBER, HANGS = (61, 61), (62, 62), (63, 63)
"""The sizes of pictures that the plug-in cannot stand."""
REASON = "these pictures are too hard"

MODULE = f'''
import time

import torch

available_pipelines = ["{NAME}"]


class Blocks:
    def __init__(self, params):
        self.device, self.bits = params["vision_device"], params["vision_bits"]
        self.weights = None

    def name(self):
        return "{NAME}"

    def image_start(self):
        return "{START}"

    def image_end(self):
        return "{END}"

    def placeholder_token_id(self):
        return {PLACEHOLDER}

    def num_image_embeds(self):
        return {NUM_EMBEDS}

    def load(self):
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.randn(48, {NUM_EMBEDS * HIDDEN_SIZE}, generator=generator) / 48**0.5

    def embed_images(self, images):
        sizes = [image.size for image in images]
        if {RAISES} in sizes:
            raise RuntimeError("{REASON}")
        if {HANGS} in sizes:
            time.sleep(1000)
        rows = []
        for image in images:
            pixels = torch.tensor(list(image.resize((4, 4)).tobytes()), dtype=torch.float32) / 128 - 1
            rows.append((pixels @ self.weights).view({NUM_EMBEDS}, {HIDDEN_SIZE}))
        if {WRONG_NUMBER} in sizes:
            rows = [row[:-1] for row in rows]
        return torch.stack(rows)


def get_pipeline(name, params):
    return Blocks(params) if name == "{NAME}" else None


def get_pipeline_from_model_name(model_name, params):
    return Blocks(params) if "blocks" in model_name else None
'''

_PROJECT = f"""
[project]
name = "raylens-test-blocks"
version = "1.0"

[project.entry-points."raylens.vision_plugins"]
"{NAME}" = "raylens_test_blocks"

[tool.setuptools]
py-modules = ["raylens_test_blocks"]
"""

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def unpack(folder: Path, target: Path) -> set[str]:
    """Builds the package's wheel in `folder` and unpacks it into `target`. Returns the names of what is there then."""
    (folder / "raylens_test_blocks.py").write_text(MODULE)
    (folder / "pyproject.toml").write_text(_PROJECT)
    code = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
        return {name.partition("/")[0] for name in archive.namelist()}


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Installs the package for as long as the context lasts. One module of tests may do so at a time."""
    site_packages = Path(sysconfig.get_paths()["purelib"])
    tops = unpack(folder, site_packages)
    try:
        yield
    finally:
        for top in tops:
            place = site_packages / top
            shutil.rmtree(place) if place.is_dir() else place.unlink()


def make_text_model(folder: Path) -> str:
    """A LLaMA without any vision half, with random weights."""
    tokenizer = small_tokenizer("byte_level", (), bos=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend", **names}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            spread = 1.0 if "embed_tokens" in name else 1.5
            torch.nn.init.normal_(parameter, std=spread * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)
