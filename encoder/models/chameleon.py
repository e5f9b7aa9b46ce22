"""Chameleon and Emu3: their VQ model turns a picture into tokens, and the language model's embedding table gives their
embeddings."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality
from raylens.preprocess.schema import ItemTensors


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    pixels = torch.stack([item["pixel_values"] for item in items])
    return list(model.get_image_features(pixel_values=pixels).pooler_output)


def _num_patches(config: PreTrainedConfig, item: ItemTensors) -> int:
    """Returns the number of positions after the VQ model's last stage: each stage but the last halves both sides."""
    side = 2 ** (len(config.vq_config.channel_multiplier) - 1)
    height, width = item["pixel_values"].shape[-2:]
    return int(height // side * (width // side))


CHAMELEON = VisionFamily(
    whole="ChameleonForConditionalGeneration",
    unused=("model.layers", "model.norm", "model.rotary_emb", "lm_head"),
    tower="model.vqmodel.encoder",
    projector=(),
    modalities={"image": VisionModality(encode=_encode, num_patches=_num_patches)},
)


def _encode_each(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    return [model.model.get_image_features(**item).pooler_output[0] for item in items]


EMU3 = VisionFamily(
    whole="Emu3ForConditionalGeneration",
    unused=("model.text_model.layers", "model.text_model.norm", "model.text_model.rotary_emb", "lm_head"),
    tower="model.vqmodel.encoder",
    projector=(),
    modalities={
        "image": VisionModality(encode=_encode_each, num_patches=_num_patches, on_host=frozenset({"image_sizes"}))
    },
)
