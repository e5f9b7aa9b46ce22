"""Mllama: a picture's features are no tokens of the decoder. Here a prompt has a token for each of them, by which the
engine knows their number."""

from dataclasses import replace

from transformers.models.mllama.image_processing_mllama import build_aspect_ratio_mask, get_optimal_tiled_canvas

from raylens.preprocess.field_layout import Outputs, whole
from raylens.preprocess.models.family import FIXED_IMAGE, HFProcessor, Kwargs, ProcessorFamily, image_token

_PATCH = 14
"""The side in pixels of a patch of all checkpoints. The processor does not know it."""


def _expansion(processor: HFProcessor, outputs: Outputs, kwargs: Kwargs) -> str:
    """Each tile has a feature for each patch and one for itself, tiles of padding, too."""
    images = processor.image_processor
    num_patches: int = (images.size["height"] // _PATCH) * (images.size["width"] // _PATCH)
    num_features: int = images.max_image_tiles * (num_patches + 1)
    return image_token(processor) * num_features


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    images = processor.image_processor
    side, max_tiles = images.size["height"], images.max_image_tiles
    rows, columns = (length // side for length in get_optimal_tiled_canvas(height, width, max_tiles, side))
    return {"aspect_ratio_mask": build_aspect_ratio_mask([[(rows, columns)]], max_tiles)}


MLLAMA = ProcessorFamily(
    processor_class="MllamaProcessor",
    modalities={
        "image": replace(
            FIXED_IMAGE,
            fields=dict.fromkeys(("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"), whole),
            size_outputs=_size_outputs,
            expansion=_expansion,
            language_fields=("aspect_ratio_mask",),
        )
    },
    items_fill_context=False,
)
"""The processor puts a BOS behind the first pictures of a text that has none. Here such a text gets none; chat
templates write one."""
