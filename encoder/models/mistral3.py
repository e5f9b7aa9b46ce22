"""Mistral Small 3.1 and later: Pixtral's tower takes pictures of any shape."""

from collections.abc import Sequence

import torch
from transformers import Mistral3ForConditionalGeneration, PreTrainedModel

from encoder.models.family import VisionFamily, VisionModality, all_together
from encoder.models.pixels import count_patches
from modeling.half_model import without
from preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """One by one: transformers lets all patches of a call attend to all others and masks those of other pictures, at
    a cost, also in memory, that grows with the square of the call."""
    return [_encode_one(model, item) for item in items]


def _encode_one(model: PreTrainedModel, item: ItemTensors) -> torch.Tensor:
    outputs = model.get_image_features(pixel_values=item["pixel_values"][None], image_sizes=item["image_sizes"][None])
    (features,) = outputs.pooler_output
    return torch.as_tensor(features)


MISTRAL3 = VisionFamily(
    model_class=without(Mistral3ForConditionalGeneration, "model.language_model", "lm_head"),
    tower="model.vision_tower",
    projector=("model.multi_modal_projector",),
    modalities={
        "image": VisionModality(encode=_encode, num_patches=count_patches("pixel_values"), batch_key=all_together)
    },
)
