"""A configuration that does not fit the weights is refused, with one of them and both shapes."""

import json
import shutil
from pathlib import Path

import pytest

from raylens.encoder.config import EncoderConfig
from raylens.encoder.loader import load_vision_half
from raylens.llm.config import EngineConfig
from raylens.llm.loader import load_language_half
from tests.llm.ranks import silent_rank


def with_mlps_of(size: int, part: str, shapes: str, folder: Path) -> str:
    copy = Path(shutil.copytree(shapes, folder / "model"))
    config = json.loads((copy / "config.json").read_text())
    config[part]["intermediate_size"] = size
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


def test_of_the_language_half(shapes: str, tmp_path: Path) -> None:
    model = with_mlps_of(528, "text_config", shapes, tmp_path)
    reason = r"config.json does not fit \d+ weights of the language half: .*down_proj.* has the shape \(192, .*, not "
    with pytest.raises(ValueError, match=reason):
        load_language_half(EngineConfig(model))
    with pytest.raises(ValueError, match=r"a weight of shape \(192, 512\) is stored, 528 on dimension -1"):
        load_language_half(EngineConfig(model), silent_rank(0, 2))


def test_of_the_vision_half(shapes: str, tmp_path: Path) -> None:
    model = with_mlps_of(144, "vision_config", shapes, tmp_path)
    with pytest.raises(ValueError, match=r"config.json does not fit \d+ weights of the vision half: .*fc1.* has"):
        load_vision_half(EncoderConfig(model))
