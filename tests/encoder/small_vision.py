"""Small checkpoints of every family, and items with what the whole model of transformers makes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality
from raylens.modeling.families import load_family
from raylens.preprocess.schema import ItemInfo, ItemTensors
from tests.preprocess.parity import Pair, pair
from tests.preprocess.video_parity import items_of, one_shot, prompt_of
from tests.small_models import VOCABULARY, item_features, make_checkpoint, whole_class

OTHER_BITS_TOGETHER = ("mistral3",)
"""Of pictures in one call the whole model makes other bits than of each alone: it masks all other pictures' patches,
instead of leaving them out."""


@dataclass(frozen=True)
class Prompt:
    """The items of one prompt as Preprocess makes them, (info, tensors) each, and what the whole model puts into their
    placeholders, from what transformers' own processor makes of the whole prompt. Of OTHER_BITS_TOGETHER, what it puts
    there in prompts of one."""

    modality: str
    items: list[tuple[ItemInfo, ItemTensors]]
    expected: list[torch.Tensor]

    @property
    def tensors(self) -> list[ItemTensors]:
        return [tensors for _, tensors in self.items]


@dataclass(frozen=True)
class Small:
    """A checkpoint with prompts of one item and of several."""

    model_type: str
    checkpoint: str
    prompts: list[Prompt]

    @property
    def family(self) -> VisionFamily:
        family: VisionFamily = load_family("encoder", self.model_type)
        return family

    def modality(self, prompt: Prompt) -> VisionModality:
        return self.family.modalities[prompt.modality]

    def whole(self) -> PreTrainedModel:
        model: PreTrainedModel = whole_class(self.model_type).from_pretrained(self.checkpoint, dtype=torch.float32)
        return model.eval()


def make_small(model_type: str, folder: Path) -> Small:
    small = Small(model_type, make_checkpoint(model_type, folder), [])
    families, whole = pair(model_type, VOCABULARY, "auto"), small.whole()
    small.prompts.extend(_prompt(families, whole, "image", pictures) for pictures in _pictures(families))
    if "video" in small.family.modalities:
        small.prompts.extend(_prompt(families, whole, "video", [index]) for index in range(3))
    return small


def _pictures(families: Pair) -> list[list[int]]:
    """By their index in `parity.picture`: of all shapes alone and, where a prompt takes several, together."""
    if families.model_type == "aria":  # pictures of 980 pixels
        return [[0], [1]]
    alone = [[index] for index in range(5)]
    return alone if families.family.modalities["image"].max_items == 1 else [*alone, [0, 3, 1]]


def _prompt(families: Pair, whole: PreTrainedModel, modality: str, indices: Sequence[int]) -> Prompt:
    inputs = _inputs(families, modality, indices)
    # The frames of some are pictures to the whole model.
    name = "video" if "pixel_values_videos" in inputs else "image"
    with torch.inference_mode():
        rows = item_features(whole, name, inputs)
    if families.model_type in OTHER_BITS_TOGETHER and len(indices) > 1:
        together, rows = rows, torch.cat([_prompt(families, whole, modality, [index]).expected[0] for index in indices])
        torch.testing.assert_close(rows, together, rtol=1e-4, atol=1e-4)
    # Pictures that have company are treated differently by some.
    media = [(modality, index) for index in indices]
    items = items_of(families, media, modality) if modality == "video" else families.items(indices)
    return Prompt(modality, items, list(torch.split(rows, [info.num_embeds for info, _ in items])))


def _inputs(families: Pair, modality: str, indices: Sequence[int]) -> dict[str, Any]:
    media = [(modality, index) for index in indices]
    text = prompt_of(families.model_type, ["a", *["b"] * len(media)], media)
    inputs = families.one_shot(text, indices) if modality == "image" else one_shot(families, text, media)
    if "image_patches" in inputs:  # Fuyu's name for them
        inputs["pixel_values"] = inputs.pop("image_patches")
    return inputs
