"""Each family's small checkpoint is built, loads, and its Hugging Face processor takes an image and a video."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import transformers
from transformers.utils import is_torchvision_available

from raylens.modeling.families import RETRIEVAL, load_family
from raylens.modeling.torchvision_build import make_importable
from raylens.preprocess.hf_processor import load_processor
from tests.pictures import disc
from tests.preprocess.small_processors import FAMILIES, VIDEO_FAMILIES, Vocabulary, prompt_placeholder, save_processor

# transformers imports its image processors, and so torchvision, only when one is asked for.
make_importable()

# What these have without torchvision: no image processor at all, no processor class, a patchify that always fails, no
# video processor, which the processor needs.
NEEDS_TORCHVISION = frozenset({"molmo2", "phi4_multimodal", "mistral3", "fuyu", "minicpmv4_6"})
VOCABULARIES: tuple[Vocabulary, ...] = get_args(Vocabulary)

all_families = pytest.mark.parametrize("model_type", FAMILIES)
both_vocabularies = pytest.mark.parametrize("vocabulary", VOCABULARIES)


def load(model_type: str, vocabulary: Vocabulary, folder: Path) -> Any:
    """The processor of a new checkpoint; without torchvision, one that has no video processor."""
    if model_type == "smolvlm":
        pytest.importorskip("num2words")
    path = save_processor(model_type, vocabulary, folder)
    if model_type == "wemm":
        return load_processor(load_family("preprocess", model_type), path)
    if is_torchvision_available():
        return transformers.AutoProcessor.from_pretrained(path)
    if model_type in NEEDS_TORCHVISION:
        pytest.skip("needs torchvision")
    if model_type in VIDEO_FAMILIES:
        return load_without_video(path)
    return transformers.AutoProcessor.from_pretrained(path)


def load_without_video(path: str) -> Any:
    settings, _ = transformers.ProcessorMixin.get_processor_dict(path)
    family_class = getattr(transformers, settings.pop("processor_class"))
    # The check of the parts' classes refuses `None`, and fails itself where torchvision is missing.
    unchecked = type(family_class.__name__, (family_class,), {"check_argument_for_proper_class": lambda *_: None})
    parts = {
        "image_processor": transformers.AutoImageProcessor.from_pretrained(path),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(path),
    }
    return unchecked(**parts, video_processor=None, **settings)


def check_ids(processor: Any, inputs: Any) -> None:
    ids = inputs["input_ids"][0].tolist()
    assert processor.tokenizer.unk_token_id not in ids
    assert max(ids) < len(processor.tokenizer)


@all_families
@both_vocabularies
def test_the_configuration_is_that_of_the_tokenizer(model_type: str, vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = save_processor(model_type, vocabulary, tmp_path)
    config = transformers.AutoConfig.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text = config.get_text_config()
    assert config.model_type == model_type
    num_more = model_type == "mllama"  # the token of a picture
    assert text.vocab_size + getattr(text, "additional_vocab_size", 0) + num_more == len(tokenizer)
    assert tokenizer.model_max_length == 1_000_000
    assert None not in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    ids = tokenizer("A b.\nc é ż", add_special_tokens=False)["input_ids"]
    # transformers gives Qwen3.5's tokenizers the decoder of bytes.
    if not (model_type.startswith("qwen3_5") and vocabulary == "metaspace"):
        assert tokenizer.decode(ids).strip() == "A b.\nc é ż"
    assert tokenizer.unk_token_id not in ids


@all_families
@both_vocabularies
def test_an_image_is_processed(model_type: str, vocabulary: Vocabulary, tmp_path: Path) -> None:
    processor = load(model_type, vocabulary, tmp_path)
    # The processors of retrieval models write the text beside a picture themselves.
    text = None if model_type in RETRIEVAL else f"What is\n\n{prompt_placeholder(model_type)}\n\n in it?"
    inputs = processor(images=[disc("red", (60, 100))], text=text, return_tensors="pt")
    check_ids(processor, inputs)
    assert any("pixel_values" in name or name == "image_patches" for name in inputs)


@pytest.mark.parametrize("model_type", sorted(VIDEO_FAMILIES))
@both_vocabularies
def test_a_video_is_processed(model_type: str, vocabulary: Vocabulary, tmp_path: Path) -> None:
    if not is_torchvision_available():
        pytest.skip("needs torchvision")
    processor = load(model_type, vocabulary, tmp_path)
    frames = np.stack([np.asarray(disc("blue", (80, 60), (2 * i, i))) for i in range(6)])
    metadata = {"total_num_frames": 6, "fps": 2.0, "duration": 3.0, "frames_indices": list(range(6))}
    text = f"a{prompt_placeholder(model_type, 'video')}b"
    inputs = processor(
        videos=[frames], text=text, video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
    )
    check_ids(processor, inputs)


@all_families
@both_vocabularies
def test_the_chat_template_is_optional(model_type: str, vocabulary: Vocabulary, tmp_path: Path) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "Hi"}]
    path = save_processor(model_type, vocabulary, tmp_path / "with")
    rendered = transformers.AutoTokenizer.from_pretrained(path).apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    assert rendered.removeprefix("<s>") == f"user: {prompt_placeholder(model_type)}Hi\nassistant:"
    path = save_processor(model_type, vocabulary, tmp_path / "without", chat_template=False)
    assert transformers.AutoTokenizer.from_pretrained(path).chat_template is None


def test_checkpoints_are_the_same_each_time(tmp_path: Path) -> None:
    for vocabulary in VOCABULARIES:
        for name in ("a", "b"):
            save_processor("llava", vocabulary, tmp_path / name)
        first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("a", "b"))
        assert first == second
