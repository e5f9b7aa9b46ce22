"""Families whose pictures are one or several tiles of one size. The tower encodes tiles independently, and every tile
has the same number of embeddings."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality
from raylens.encoder.models.pixels import by_tile, count_patches, joined_tiles, split_tiles
from raylens.preprocess.schema import ItemTensors


def _tiles(name: str) -> VisionModality:
    """Returns the modality of items whose pixels are the field `name`."""

    def encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
        pixels, counts = joined_tiles(items, name)
        return split_tiles(model.base_model.get_image_features(pixel_values=pixels).pooler_output, counts)

    return VisionModality(encode=encode, num_patches=count_patches(name), division=by_tile(name))


def _encode_masked(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    """Encodes Aria's items, whose tiles have a mask of padding, (num_tiles, height, width)."""
    pixels, counts = joined_tiles(items, "pixel_values")
    mask = torch.cat([item["pixel_mask"] for item in items])
    return split_tiles(model.base_model.get_image_features(pixel_values=pixels, pixel_mask=mask).pooler_output, counts)


IMAGE = _tiles("pixel_values")
_GENERATION = ("model.vqmodel", "model.generation_embeddings", "model.generation_aligner", "model.generation_head")

ARIA = VisionFamily(
    whole="AriaForConditionalGeneration",
    tower="model.vision_tower",
    projector=("model.multi_modal_projector",),
    modalities={
        "image": VisionModality(
            encode=_encode_masked,
            num_patches=count_patches("pixel_values"),
            division=by_tile("pixel_values", "pixel_mask"),
        )
    },
)
BLIP_2 = VisionFamily(
    whole="Blip2ForConditionalGeneration",
    unused=("language_model",),
    tower="vision_model",
    projector=("query_tokens", "qformer", "language_projection"),
    modalities={"image": IMAGE},
    has_tiles=True,
)


def _family(whole: str, tower: str, projector: str, *unused: str, **more: VisionModality) -> VisionFamily:
    """Returns a family with pictures as tiles and `more` modalities, without the model's language half and the `unused`
    parts."""
    return VisionFamily(
        whole=whole,
        unused=("model.language_model", "lm_head", *unused),
        tower=tower,
        projector=(projector,),
        modalities={"image": IMAGE, **more},
        has_tiles=True,
    )


_TOWER = ("model.vision_tower", "model.multi_modal_projector")
_DEEPSEEK = ("model.vision_model", "model.aligner")

DEEPSEEK_VL = _family("DeepseekVLForConditionalGeneration", *_DEEPSEEK)
GEMMA3 = _family("Gemma3ForConditionalGeneration", *_TOWER)
# A frame of a video is a tile.
INTERNVL = _family("InternVLForConditionalGeneration", *_TOWER, video=_tiles("pixel_values_videos"))
JANUS = _family("JanusForConditionalGeneration", *_DEEPSEEK, *_GENERATION)
LLAVA = _family("LlavaForConditionalGeneration", *_TOWER)
PALIGEMMA = _family("PaliGemmaForConditionalGeneration", *_TOWER)
VIPLLAVA = _family("VipLlavaForConditionalGeneration", *_TOWER)
