"""A half of a checkpoint is read from safetensors only."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raylens.encoder.config import EncoderConfig
from raylens.encoder.loader import load_vision_half
from raylens.llm.config import EngineConfig
from raylens.llm.loader import load_language_half
from raylens.modeling.checkpoint_conversion import MODEL_RENAMINGS, convert_checkpoint


@pytest.fixture
def pickled(shapes: str, tmp_path: Path) -> Path:
    """The bundled checkpoint with its weights as a pickle."""
    folder = shutil.copytree(shapes, tmp_path / "pickled")
    for file in folder.glob("*.safetensors"):
        torch.save(load_file(file), folder / "pytorch_model.bin")
        file.unlink()
    return folder


def test_pickled_weights_are_refused_until_they_are_converted(pickled: Path, tmp_path: Path) -> None:
    for load in (
        lambda: load_language_half(EngineConfig(str(pickled))),
        lambda: load_vision_half(EncoderConfig(str(pickled))),
    ):
        with pytest.raises(ValueError, match=r"no weights as safetensors, .* `raylens convert safetensors SRC DST`"):
            load()
    convert_checkpoint(pickled, tmp_path / "converted", MODEL_RENAMINGS["safetensors"])
    load_language_half(EngineConfig(str(tmp_path / "converted")))


def test_pickled_weights_that_the_settings_name_are_refused_beside_safetensors(shapes: str, tmp_path: Path) -> None:
    folder = shutil.copytree(shapes, tmp_path / "named")
    (folder / "other.bin").touch()
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"transformers_weights": "other.bin"}))
    with pytest.raises(ValueError, match="its weights are in other.bin, and no pickled weights are read"):
        load_language_half(EngineConfig(str(folder)))
