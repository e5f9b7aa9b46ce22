"""The pipelines that come with Raylens make the embeddings of transformers' whole models from the same weights."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import CLIPVisionModel, PreTrainedModel

from encoder.config import EncoderConfig
from encoder.engine import EncoderEngine
from pipelines import registry
from pipelines.interface import PipelineError
from pipelines.registry import PipelineChoice, find_pipeline, installed_pipelines
from preprocess.hf_processor import load_processor
from preprocess.models.blip_2 import BLIP_2
from preprocess.models.llava import LLAVA
from preprocess.processor import MultiModalProcessor, ProcessorConfig
from tests.pictures import encoded
from tests.pipelines import plug_in
from tests.pipelines.test_registry import PARAMS
from tests.preprocess.parity import picture
from tests.small_models import make_checkpoint, whole_class

FULL = {**PARAMS, "vision_bits": 32, "projector_bits": 32}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return plug_in.make_text_model(tmp_path_factory.mktemp("llama"))


class Whole:
    """A small model with a vision half, whose parts are saved as the pipeline's weights are published."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.checkpoint = make_checkpoint(model_type, folder)
        self.model: PreTrainedModel = whole_class(model_type).from_pretrained(self.checkpoint, dtype=torch.float32)
        self.model.eval()
        self.processor = load_processor(LLAVA if model_type == "llava" else BLIP_2, self.checkpoint, backend="pil")

    @torch.inference_mode()
    def features(self, image: Image.Image) -> torch.Tensor:
        pixels = self.processor.image_processor([image], return_tensors="pt")["pixel_values"]
        features: Any = self.model.get_image_features(pixel_values=pixels).pooler_output
        own: torch.Tensor = features[0]
        return own


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llava_options(llava: Whole, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parts")
    parts: Any = llava.model.model
    tower = CLIPVisionModel(llava.model.config.vision_config)
    tower.load_state_dict(parts.vision_tower.state_dict())
    tower.save_pretrained(folder)
    llava.processor.image_processor.save_pretrained(folder)
    projector = parts.multi_modal_projector
    weights = {"0": projector.linear_1, "2": projector.linear_2}
    state = {f"model.mm_projector.{at}.{name}": one for at in weights for name, one in weights[at].state_dict().items()}
    torch.save(state, folder / "mm_projector.bin")
    return {"vision_model": str(folder), "projector": str(folder)}


@pytest.fixture(scope="module")
def blip_2(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole("blip-2", tmp_path_factory.mktemp("blip"))


@pytest.fixture(scope="module")
def minigpt4_options(blip_2: Whole, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    projector: Any = blip_2.model.language_projection
    file = tmp_path_factory.mktemp("parts") / "pretrained_minigpt4.pth"
    torch.save({"model": {f"llama_proj.{name}": one for name, one in projector.state_dict().items()}}, file)
    return {"vision_model": blip_2.checkpoint, "projector": str(file)}


def embedded(text_model: str, name: str, params: dict[str, Any], images: list[Image.Image]) -> list[torch.Tensor]:
    """By the processor and the encoder, all pictures in one batch."""
    choice = PipelineChoice(name, None, params)
    items = MultiModalProcessor(ProcessorConfig(text_model, pipeline=choice)).items
    engine = EncoderEngine(EncoderConfig(text_model, pipeline=choice))
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


def squared(image: Image.Image) -> Image.Image:
    """In the middle of a square of CLIP's mean colour."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), (122, 116, 104))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def test_they_are_installed() -> None:
    assert {"llava-v1.5", "llava-v1.5-13b", "minigpt4"} <= set(installed_pipelines())


def test_llava_makes_the_embeddings_of_the_whole_model(
    text_model: str, llava: Whole, llava_options: dict[str, Any]
) -> None:
    pictures = [picture(index) for index in range(4)]
    found = embedded(text_model, "llava-v1.5", {**FULL, **llava_options}, pictures)
    for one, image in zip(found, pictures, strict=True):
        torch.testing.assert_close(one, llava.features(squared(image)), rtol=1e-4, atol=1e-5)


def test_minigpt4_makes_the_embeddings_of_the_whole_model(
    text_model: str, blip_2: Whole, minigpt4_options: dict[str, Any]
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
    with pytest.raises(PipelineError, match="'llava-v1.5' cannot load: .*32, 16 or 8 bits, not 4"):
        embedded(text_model, "llava-v1.5", {**FULL, **llava_options, "vision_bits": 4}, [])


def test_weights_that_are_not_there_or_of_another_form_are_named(
    text_model: str, llava_options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(PipelineError, match=f"the weights mm_projector.bin of {tmp_path} cannot be read"):
        embedded(text_model, "llava-v1.5", {**FULL, **llava_options, "projector": str(tmp_path)}, [])
    torch.save({"model.mm_projector.weight": torch.zeros(2, 2)}, tmp_path / "mm_projector.bin")
    with pytest.raises(PipelineError, match="not those of LLaVA 1.5's projector"):
        embedded(text_model, "llava-v1.5", {**FULL, **llava_options, "projector": str(tmp_path)}, [])


def test_a_pickle_with_code_is_not_run(text_model: str, llava_options: dict[str, Any], tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "was_run",))

    torch.save({"model.mm_projector.0.weight": Code()}, tmp_path / "mm_projector.bin")
    with pytest.raises(PipelineError, match=r"mm_projector.bin .* cannot be read"):
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
    own = [point for point in entry_points(group=registry.ENTRY_POINTS) if point.value.startswith("pipelines.")]
    monkeypatch.setattr(registry, "entry_points", lambda group: own)
    options = minigpt4_options if name == "minigpt4" else llava_options
    assert find_pipeline(PipelineChoice(None, None, {**FULL, **options}), f"/models/{model}").name() == name
