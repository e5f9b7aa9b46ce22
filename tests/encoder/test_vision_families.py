"""For every family, embeddings are to the bit what the whole model puts into its placeholders, alone and in batches."""

import json
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from raylens.encoder.config import EncoderConfig
from raylens.encoder.engine import EncoderEngine
from raylens.encoder.loader import load_vision_half
from raylens.encoder.schema import Segment
from raylens.encoder.segments import divide, join
from raylens.llm.config import EngineConfig
from raylens.llm.loader import load_language_half
from raylens.modeling.families import SERVED_FAMILIES, known_to, load_family
from raylens.preprocess.schema import ItemTensors
from tests.checkpoint_copies import copy_checkpoint
from tests.encoder.same_numbers import is_same
from tests.encoder.small_vision import Prompt, Small
from tests.small_models import make_checkpoint
from tests.wemm_reference import names_in_halves


@pytest.fixture(scope="module")
def half(small: Small) -> PreTrainedModel:
    model, _ = load_vision_half(EncoderConfig(small.checkpoint))
    return model


@torch.inference_mode()
def encode(small: Small, half: PreTrainedModel, prompt: Prompt, items: list[ItemTensors]) -> list[torch.Tensor]:
    return small.modality(prompt).encode(half, items)


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [one.shape for one in found] == [one.shape for one in expected]
    assert all(is_same(one, other) for one, other in zip(found, expected, strict=True))


def test_all_that_preprocess_makes_for_the_decoder_is_encoded() -> None:
    for model_type in known_to("encoder"):
        vision, processor = load_family("encoder", model_type), load_family("preprocess", model_type)
        assert vision.modalities.keys() == processor.modalities.keys(), model_type


@pytest.mark.long
def test_an_item_alone_equals_the_whole_models(small: Small, half: PreTrainedModel) -> None:
    """Also an item that the whole model had among others: in these dtypes and sizes, neighbours change no bit."""
    for prompt in small.prompts:
        found = [encode(small, half, prompt, [tensors])[0] for tensors in prompt.tensors]
        assert_equal(found, prompt.expected)
        assert [len(one) for one in found] == [info.num_embeds for info, _ in prompt.items]


@pytest.mark.long
def test_the_items_of_a_prompt_equal_the_whole_models(small: Small, half: PreTrainedModel) -> None:
    for prompt in small.prompts:
        assert_equal(encode(small, half, prompt, prompt.tensors), prompt.expected)


@dataclass
class Batch:
    prompt: Prompt
    items: list[ItemTensors]
    expected: list[torch.Tensor]


def batches(small: Small) -> dict[Hashable, Batch]:
    """All items, those together that may be encoded together."""
    found: dict[Hashable, Batch] = {}
    for prompt in small.prompts:
        for item, expected in zip(prompt.tensors, prompt.expected, strict=True):
            key = prompt.modality, small.modality(prompt).batch_key(item)
            batch = found.setdefault(key, Batch(prompt, [], []))
            batch.items.append(item)
            batch.expected.append(expected)
    return found


@pytest.mark.long
def test_items_of_all_sizes_together_equal_each_alone(small: Small, half: PreTrainedModel) -> None:
    found = batches(small)
    for batch in found.values():
        assert_equal(encode(small, half, batch.prompt, batch.items), batch.expected)
        assert_equal(encode(small, half, batch.prompt, batch.items[::-1]), batch.expected[::-1])
    # Nothing but OneVision's pictures with and without tiles has to be kept apart.
    numbers = {"image": 2 if small.model_type == "llava_onevision" else 1, "video": 1}
    assert len(found) == sum(numbers[modality] for modality in {prompt.modality for prompt in small.prompts})


DIVIDED = {
    ("idefics3", "image"),
    ("internvl", "image"),
    ("internvl", "video"),
    ("llava_onevision", "video"),
    ("minicpm_ocr", "image"),
    ("minicpmv4_6", "image"),
    ("minicpmv4_7", "image"),
    ("molmo2", "video"),
    ("qwen2_5_vl", "video"),
    ("qwen2_vl", "video"),
    ("qwen3_5", "video"),
    ("qwen3_5_moe", "video"),
    ("qwen3_vl", "video"),
    ("qwen3_vl_moe", "video"),
    ("smolvlm", "image"),
    ("smolvlm", "video"),
}
"""Whose items consist of several units, of those here, and may be divided."""


def segments_of(small: Small, half: PreTrainedModel, prompt: Prompt, num_units: int) -> list[tuple[Segment, ...]]:
    """Each item's, of about `num_units` of its units."""
    modality = small.modality(prompt)
    found = []
    for item in prompt.tensors:
        count = modality.division.num_units(item) if modality.division else 1
        max_patches = -(-modality.num_patches(half.config, item) * num_units // count)
        found.append(divide(modality, half.config, item, max_patches))
    return found


@pytest.mark.long
@pytest.mark.parametrize("num_units", [1, 2])
@torch.inference_mode()
def test_an_item_in_segments_equals_the_whole_models(small: Small, half: PreTrainedModel, num_units: int) -> None:
    divided = set()
    for prompt in small.prompts:
        modality, found = small.modality(prompt), segments_of(small, half, prompt, num_units)
        for item, segments, expected in zip(prompt.tensors, found, prompt.expected, strict=True):
            rows = [encode(small, half, prompt, [segment.tensors])[0] for segment in segments]
            assert_equal([join(modality, rows)], [expected])
            costs = [modality.num_patches(half.config, segment.tensors) for segment in segments]
            assert costs == [segment.num_patches for segment in segments]
            assert sum(costs) == modality.num_patches(half.config, item)
            assert {modality.batch_key(segment.tensors) for segment in segments} == {modality.batch_key(item)}
            divided |= {(small.model_type, prompt.modality)} if len(segments) > 1 else set()
    if num_units == 1:
        assert divided == {pair for pair in DIVIDED if pair[0] == small.model_type}


@pytest.mark.long
@torch.inference_mode()
def test_segments_of_several_items_together_equal_the_whole_models(small: Small, half: PreTrainedModel) -> None:
    for prompt in small.prompts:
        found = segments_of(small, half, prompt, 1)
        rows = iter(encode(small, half, prompt, [segment.tensors for segments in found for segment in segments]))
        joined = [join(small.modality(prompt), [next(rows) for _ in segments]) for segments in found]
        assert_equal(joined, prompt.expected)


@pytest.mark.long
def test_an_engine_makes_the_same_of_all_items_in_the_smallest_segments(small: Small) -> None:
    engine = EncoderEngine(EncoderConfig(small.checkpoint, max_batch_patches=1, num_threads=1))
    expected: dict[str, torch.Tensor] = {}
    for number, prompt in enumerate(small.prompts):
        for place, (item, own) in enumerate(zip(prompt.tensors, prompt.expected, strict=True)):
            engine.add_request(f"{number} {place}", prompt.modality, item)
            expected[f"{number} {place}"] = own
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
            assert output.embeddings is not None
            assert is_same(output.embeddings, expected.pop(output.request_id)), output.request_id
    assert not expected


def test_pictures_that_stay_their_size_are_encoded_only_with_their_like() -> None:
    item = {"pixel_values": torch.zeros(3, 56, 56)}
    larger = {"pixel_values": torch.zeros(3, 56, 70)}
    key = load_family("encoder", "llava").modalities["image"].batch_key
    assert key(item) == key(dict(item)) != key(larger)


def test_embeddings_depend_on_the_item(small: Small) -> None:
    by_item: dict[Hashable, list[torch.Tensor]] = defaultdict(list)
    for prompt in small.prompts:
        if len(prompt.items) == 1:
            by_item[prompt.modality] += prompt.expected
    for embeddings in by_item.values():
        contents = {one.numpy().tobytes() for one in embeddings}
        assert len(contents) == len(embeddings)


PATCH_LAYERS = {
    "chameleon": "model.vqmodel.quant_conv",  # leaves a row for each token
    "florence2": "model.vision_tower.convs.1",
    "gemma3n": "model.vision_tower.timm_model.blocks.2.2",
}
"""What makes patches where a tower's first layer does not; of those in stages, in that with the most layers."""


def patch_layer(small: Small, half: PreTrainedModel) -> nn.Conv2d | nn.Conv3d | nn.Linear:
    """What makes patches of pixels, each a row of its own."""
    tower = half.get_submodule(PATCH_LAYERS.get(small.model_type, small.family.tower))
    return next(module for module in tower.modules() if isinstance(module, nn.Conv2d | nn.Conv3d | nn.Linear))


@pytest.mark.long
def test_the_number_of_patches_is_what_goes_through_the_tower(small: Small, half: PreTrainedModel) -> None:
    layer, counts = patch_layer(small, half), []
    num_channels = layer.weight.shape[0]
    hook = layer.register_forward_hook(lambda layer, args, output: counts.append(output.numel() // num_channels))
    for prompt in small.prompts:
        for tensors in prompt.tensors:
            encode(small, half, prompt, [tensors])
            assert counts == [small.modality(prompt).num_patches(half.config, tensors)]
            counts.clear()
    hook.remove()


def test_what_is_left_of_a_side_is_no_patch() -> None:
    """As of SigLIP's 384 pixels by 14."""
    config = SimpleNamespace(vision_config=SimpleNamespace(patch_size=14))
    item = {"pixel_values": torch.zeros(2, 3, 384, 384)}
    assert (
        load_family("encoder", "llava_onevision").modalities["image"].num_patches(cast(Any, config), item) == 2 * 27**2
    )


SHARED = {
    "chameleon": {"model.embed_tokens.weight"},  # of which pictures are rows
    "blip-2": {"query_tokens"},
    # Of tokens for pictures and sounds that are text, too; the last one of sounds fills up their rows.
    "gemma3n": {
        f"model.{name}.weight"
        for name in (
            *("embed_vision.embedding_projection", "embed_audio.embedding_projection"),
            *("embed_audio.embedding", "embed_audio.hard_embedding_norm"),
        )
    },
    "llava_next": {"model.image_newline"},
    "llava_onevision": {"model.image_newline"},
}
"""What both halves have."""
UNUSED = {
    "janus": ("model.vqmodel.", "model.generation_"),  # makes pictures
    "phi4_multimodal": ("model.embed_tokens_extend.audio_embed.",),
}
"""What neither half has."""
LANGUAGE = ("model.language_model.", "lm_head.")
"""What a half that is not here would have."""


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """By their names in the half that has them."""
    named = dict(model.named_parameters())
    return dict(zip(names_in_halves(named), named.values(), strict=True))


def language_parameters(small: Small, whole: PreTrainedModel) -> set[str]:
    """Those of the half that the decoder loads, or would."""
    if small.model_type in SERVED_FAMILIES:
        return set(parameters(load_language_half(EngineConfig(small.checkpoint))[0]))
    return {name for name in parameters(whole) if name.startswith(LANGUAGE)}


def test_only_the_vision_half_is_loaded(small: Small, half: PreTrainedModel) -> None:
    whole_model = small.whole()
    own, whole = parameters(half), parameters(whole_model)
    others = language_parameters(small, whole_model)
    assert own.keys() & others == SHARED.get(small.model_type, set())
    left = whole.keys() - own.keys() - others
    assert bool(left) == (small.model_type in UNUSED)
    assert all(name.startswith(UNUSED[small.model_type]) for name in left)
    assert all(torch.equal(value, whole[name]) for name, value in own.items())
    buffers = {name for name, _ in half.named_buffers()}
    assert buffers <= {name for name, _ in whole_model.named_buffers()}
    assert not any("language_model" in name or "text_model" in name for name in buffers)


def test_the_projector_is_what_its_paths_name(small: Small, half: PreTrainedModel) -> None:
    names = parameters(half)
    for path in (*small.family.projector, small.family.tower):
        assert any(name == path or name.startswith(f"{path}.") for name in names), path


@pytest.mark.parametrize("index", [0, -1])
def test_a_checkpoint_that_lacks_a_weight_is_refused(
    small: Small, half: PreTrainedModel, tmp_path: Path, index: int
) -> None:
    missing = [value for value in parameters(half).values() if value.ndim > 1][index]
    # Its name in the file may be another one.
    weights = load_file(Path(small.checkpoint) / "model.safetensors")
    (name,) = [name for name, value in weights.items() if torch.equal(value, missing)]
    copy = copy_checkpoint(small.checkpoint, tmp_path, lambda other: None if other == name else other)
    with pytest.raises(ValueError, match="lacks weights of the vision half"):
        load_vision_half(EncoderConfig(copy))


@pytest.mark.parametrize("model_type", ["florence2", "gemma3", "qwen3_vl", "smolvlm"])
def test_checkpoints_without_an_output_head_of_their_own_load(tmp_path: Path, model_type: str) -> None:
    half, _ = load_vision_half(EncoderConfig(make_checkpoint(model_type, tmp_path, is_tied=True)))
    assert not any("lm_head" in name or "embed_tokens" in name for name in parameters(half))


@pytest.mark.parametrize("model_type", ["idefics3", "smolvlm"])
def test_a_blank_tile_takes_no_rows_from_its_neighbours(tmp_path: Path, model_type: str) -> None:
    half, family = load_vision_half(EncoderConfig(make_checkpoint(model_type, tmp_path)))
    modality = family.modalities["image"]
    mask = torch.ones(1, 3, 56, 56, dtype=torch.long)
    items = [{"pixel_values": torch.randn(1, 3, 3, 56, 56), "pixel_attention_mask": mask} for _ in range(2)]
    items[0]["pixel_values"][0, 1] = 0
    with torch.inference_mode():
        blank, other = modality.encode(half, items)
        (alone,) = modality.encode(half, items[1:])
    assert torch.equal(other, alone)
    assert len(blank) == len(other) // 3 * 2
    # Alone, the blank tile would have rows.
    assert [len(divide(modality, half.config, item, 1)) for item in items] == [1, 3]


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["aria", "gemma3"])
@torch.inference_mode()
def test_tiles_of_a_picture_are_encoded_independently(tmp_path: Path, model_type: str) -> None:
    """The pictures of the other tests are of one tile each."""
    half, family = load_vision_half(EncoderConfig(make_checkpoint(model_type, tmp_path)))
    modality, side = family.modalities["image"], half.config.vision_config.image_size
    item = {"pixel_values": torch.randn(3, 3, side, side)}
    if model_type == "aria":
        item["pixel_mask"] = torch.ones(3, side, side, dtype=torch.bool)
        item["pixel_mask"][1, side // 2 :] = False
    segments = divide(modality, half.config, item, 1)
    assert len(segments) == 3
    rows = [modality.encode(half, [segment.tensors])[0] for segment in segments]
    assert_equal([join(modality, rows)], modality.encode(half, [item]))


def test_other_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "internlm2"}))
    with pytest.raises(ValueError, match=r"'internlm2'.*only \['aria'"):
        load_vision_half(EncoderConfig(str(tmp_path)))
