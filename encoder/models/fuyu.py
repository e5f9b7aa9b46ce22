"""Fuyu has no vision tower: one linear layer turns raw patches into embeddings."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality
from raylens.encoder.models.pixels import count_rows
from raylens.preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    patches = [item["image_patches"] for item in items]
    features = model.base_model.get_image_features(pixel_values=torch.cat(patches)).last_hidden_state
    return list(features.split([len(own) for own in patches]))


FUYU = VisionFamily(
    whole="FuyuForCausalLM",
    tower="model.vision_embed_tokens",
    projector=(),
    modalities={"image": VisionModality(encode=_encode, num_patches=count_rows("image_patches"))},
)
