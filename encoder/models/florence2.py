"""Florence-2: each stage of its tower cuts what the one before made into larger patches."""

from dataclasses import replace

from transformers import Florence2ForConditionalGeneration, PreTrainedConfig

from encoder.models.family import VisionFamily
from encoder.models.tiles import IMAGE
from modeling.half_model import without
from preprocess.schema import ItemTensors


def _num_patches(config: PreTrainedConfig, item: ItemTensors) -> int:
    """Those of the first stage, which overlap and reach beyond the edge."""
    vision = config.vision_config
    margin = 2 * vision.patch_padding[0] - vision.patch_size[0]
    height, width = ((side + margin) // vision.patch_stride[0] + 1 for side in item["pixel_values"].shape[-2:])
    return int(height * width)


FLORENCE2 = VisionFamily(
    model_class=without(Florence2ForConditionalGeneration, "model.language_model", "lm_head"),
    tower="model.vision_tower",
    projector=("model.multi_modal_projector",),
    modalities={"image": replace(IMAGE, num_patches=_num_patches)},
    has_tiles=True,
)
