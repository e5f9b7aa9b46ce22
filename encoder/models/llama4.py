"""Llama 4: the projector stands beside the vision model, and `get_image_features` leaves it out."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality
from raylens.encoder.models.pixels import count_patches, joined_tiles
from raylens.preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    pixels, counts = joined_tiles(items, "pixel_values")
    features = model.get_submodule("vision_model")(pixels).last_hidden_state
    rows = model.get_submodule("multi_modal_projector")(features.flatten(0, 1)).unflatten(0, features.shape[:2])
    return [own.flatten(0, 1) for own in rows.split(counts)]


LLAMA4 = VisionFamily(
    whole="Llama4ForConditionalGeneration",
    unused=("language_model",),
    tower="vision_model",
    projector=("multi_modal_projector",),
    modalities={"image": VisionModality(encode=_encode, num_patches=count_patches("pixel_values"))},
    has_tiles=True,
)
