"""Florence-2: each stage of its tower cuts the previous stage's output into larger patches."""

import math
from dataclasses import replace

from transformers import PreTrainedConfig

from raylens.encoder.models.family import VisionFamily
from raylens.encoder.models.tiles import IMAGE
from raylens.preprocess.schema import ItemTensors


def _num_patches(config: PreTrainedConfig, item: ItemTensors) -> int:
    """Returns the number of patches of the tower's stage with the most layers.

    Patches overlap and, by padding, extend beyond the edge."""
    vision = config.vision_config
    sides = list(item["pixel_values"].shape[-2:])
    for stage in range(vision.depths.index(max(vision.depths)) + 1):
        margin = 2 * vision.patch_padding[stage] - vision.patch_size[stage]
        sides = [(side + margin) // vision.patch_stride[stage] + 1 for side in sides]
    return math.prod(sides)


FLORENCE2 = VisionFamily(
    whole="Florence2ForConditionalGeneration",
    tower="model.vision_tower",
    projector=("model.multi_modal_projector",),
    modalities={"image": replace(IMAGE, num_patches=_num_patches)},
    has_tiles=True,
)
