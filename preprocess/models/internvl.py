"""InternVL 3: a picture is cut into square tiles on the grid nearest its shape; a small view of the whole follows."""

import math
from dataclasses import replace

from raylens.preprocess.field_layout import Outputs, whole
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, Size, image_token
from raylens.preprocess.models.video import FIXED_FRAMES


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    return {"num_patches": [processor.image_processor.get_number_of_image_patches(height, width, dict(kwargs))]}


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    """Returns the size of the squarest grid with the most tiles. Such a picture gets that grid: among grids of one
    shape, the processor takes the largest one for which the picture has at least half of the pixels."""
    images = processor.image_processor
    most = kwargs.get("max_patches", images.max_patches)
    rows = next(rows for rows in range(math.isqrt(most), 0, -1) if most % rows == 0)
    side = max(images.size["height"], images.size["width"])
    return [(rows * side, most // rows * side)]


INTERNVL = ProcessorFamily(
    processor_class="InternVLProcessor",
    modalities={
        "image": Modality(fields={"pixel_values": whole}, size_outputs=_size_outputs, largest=_largest),
        # Frames take the same token as tiles; Hugging Face concatenates both in `pixel_values`.
        "video": replace(FIXED_FRAMES, embed_token=image_token),
    },
)
