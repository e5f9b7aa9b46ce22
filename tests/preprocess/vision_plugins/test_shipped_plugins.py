"""The plug-ins that come with Raylens make the embeddings of transformers' whole models from the same weights."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from raylens.encoder.config import EncoderConfig
from raylens.encoder.engine import EncoderEngine
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.vision_plugins import registry
from raylens.preprocess.vision_plugins.interface import VisionPluginError
from raylens.preprocess.vision_plugins.registry import VisionPluginChoice, find_plugin, installed_plugins
from tests.pictures import encoded
from tests.preprocess.parity import picture
from tests.preprocess.vision_plugins import plug_in
from tests.preprocess.vision_plugins.test_registry import PARAMS
from tests.preprocess.vision_plugins.whole_models import WholeModel, save_llava_parts, save_minigpt4_parts, squared

FULL = {**PARAMS, "vision_bits": 32, "projector_bits": 32}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return plug_in.make_text_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> WholeModel:
    return WholeModel("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llava_options(llava: WholeModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return save_llava_parts(llava, tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def blip_2(tmp_path_factory: pytest.TempPathFactory) -> WholeModel:
    return WholeModel("blip-2", tmp_path_factory.mktemp("blip"))


@pytest.fixture(scope="module")
def minigpt4_options(blip_2: WholeModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return save_minigpt4_parts(blip_2, tmp_path_factory.mktemp("parts"))


def embedded(text_model: str, name: str, params: dict[str, Any], images: list[Image.Image]) -> list[torch.Tensor]:
    """By the processor and the encoder, all pictures in one batch."""
    choice = VisionPluginChoice(name, None, params)
    items = MultiModalProcessor(ProcessorConfig(text_model, vision_plugin=choice)).items
    engine = EncoderEngine(EncoderConfig(text_model, vision_plugin=choice))
    for index, image in enumerate(images):
        engine.add_request(str(index), "image", items.process("image", encoded(image))[1])
    outputs = engine.step()
    assert [output.batch_size for output in outputs] == [len(images)] * len(images)
    found = []
    for output in outputs:
        assert output.error is None, output.error
        assert output.embeddings is not None
        found.append(output.embeddings)
    return found


def test_they_are_installed() -> None:
    assert {"llava-v1.5", "llava-v1.5-13b", "minigpt4"} <= set(installed_plugins())


def test_llava_makes_the_embeddings_of_the_whole_model(
    text_model: str, llava: WholeModel, llava_options: dict[str, Any]
) -> None:
    pictures = [picture(index) for index in range(4)]
    found = embedded(text_model, "llava-v1.5", {**FULL, **llava_options}, pictures)
    for one, image in zip(found, pictures, strict=True):
        torch.testing.assert_close(one, llava.features(squared(image)), rtol=1e-4, atol=1e-5)


def test_minigpt4_makes_the_embeddings_of_the_whole_model(
    text_model: str, blip_2: WholeModel, minigpt4_options: dict[str, Any]
) -> None:
    pictures = [picture(index) for index in range(4)]
    found = embedded(text_model, "minigpt4", {**FULL, **minigpt4_options}, pictures)
    for one, image in zip(found, pictures, strict=True):
        torch.testing.assert_close(one, blip_2.features(image), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llava-v1.5", "minigpt4"])
@pytest.mark.parametrize(("bits", "distance"), [(16, 0.03), (8, 0.05)])
def test_fewer_bits_are_near(
    text_model: str, request: pytest.FixtureRequest, name: str, bits: int, distance: float
) -> None:
    options = request.getfixturevalue("llava_options" if name == "llava-v1.5" else "minigpt4_options")
    images = [picture(0)]
    (full,) = embedded(text_model, name, {**FULL, **options}, images)
    (found,) = embedded(text_model, name, {**FULL, **options, "vision_bits": bits, "projector_bits": bits}, images)
    assert 0 < float((found.float() - full).norm() / full.norm()) < distance


def test_bits_that_no_part_has_are_refused(text_model: str, llava_options: dict[str, Any]) -> None:
    with pytest.raises(VisionPluginError, match="'llava-v1.5' cannot load: .*32, 16, 8 bits, not 4"):
        embedded(text_model, "llava-v1.5", {**FULL, **llava_options, "vision_bits": 4}, [])


def test_weights_that_are_not_there_or_of_another_form_are_named(
    text_model: str, llava_options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(VisionPluginError, match=f"the weights mm_projector.bin of {tmp_path} cannot be read"):
        embedded(text_model, "llava-v1.5", {**FULL, **llava_options, "projector": str(tmp_path)}, [])
    torch.save({"model.mm_projector.weight": torch.zeros(2, 2)}, tmp_path / "mm_projector.bin")
    with pytest.raises(VisionPluginError, match="not those of LLaVA 1.5's projector"):
        embedded(text_model, "llava-v1.5", {**FULL, **llava_options, "projector": str(tmp_path)}, [])


def test_a_pickle_with_code_is_not_run(text_model: str, llava_options: dict[str, Any], tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "was_run",))

    torch.save({"model.mm_projector.0.weight": Code()}, tmp_path / "mm_projector.bin")
    with pytest.raises(VisionPluginError, match=r"mm_projector.bin .* cannot be read"):
        embedded(text_model, "llava-v1.5", {**FULL, **llava_options, "projector": str(tmp_path)}, [])
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llava-v1.5-7b", "llava-v1.5"),
        ("LLaVA-v1.5-13B-text", "llava-v1.5-13b"),
        ("minigpt-4-vicuna", "minigpt4"),
    ],
)
def test_they_are_found_by_the_models_name(
    llava_options: dict[str, Any],
    minigpt4_options: dict[str, Any],
    model: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Another process of tests may install one and take it away meanwhile.
    own = [point for point in entry_points(group=registry.ENTRY_POINTS) if point.value.startswith("raylens.")]
    monkeypatch.setattr(registry, "entry_points", lambda group: own)
    options = minigpt4_options if name == "minigpt4" else llava_options
    assert find_plugin(VisionPluginChoice(None, None, {**FULL, **options}), f"/models/{model}").name() == name
