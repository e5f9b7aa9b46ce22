"""Which image back end a model's processor gets."""

from pathlib import Path

import pytest

from raylens.modeling.families import load_family
from raylens.preprocess.hf_processor import load_processor
from tests.preprocess.small_processors import save_processor


@pytest.mark.parametrize("model_type", ["llava", "mistral3"])
def test_auto_is_torchvision(model_type: str, tmp_path: Path) -> None:
    path = save_processor(model_type, "byte_level", tmp_path)
    processor = load_processor(load_family("preprocess", model_type), path)
    assert not type(processor.image_processor).__name__.endswith("Pil")


def test_without_torchvision_auto_is_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylens.preprocess.hf_processor.make_importable", lambda: False)
    path = save_processor("llava", "byte_level", tmp_path)
    processor = load_processor(load_family("preprocess", "llava"), path)
    assert type(processor.image_processor).__name__ == "CLIPImageProcessorPil"
    with pytest.raises(ValueError, match="torchvision is not installed"):
        load_processor(load_family("preprocess", "mistral3"), path)


def test_a_back_end_that_the_family_lacks_is_refused(tmp_path: Path) -> None:
    path = save_processor("mistral3", "byte_level", tmp_path)
    with pytest.raises(ValueError, match="no image back end pil, only torchvision"):
        load_processor(load_family("preprocess", "mistral3"), path, backend="pil")
