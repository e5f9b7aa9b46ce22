"""Idefics3 and SmolVLM: a picture becomes tiles, each with its own mark, and a small view of the whole."""

from dataclasses import replace

from raylens.preprocess.field_layout import Outputs, blank_pixels, first_row, whole
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, Size, run_image
from raylens.preprocess.models.video import FIXED_FRAMES, clip_options, size_metadata


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    _, rows, cols = processor.image_processor.get_number_of_image_patches(height, width, dict(kwargs))
    return {"rows": [[rows]], "cols": [[cols]]}


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    longest = (kwargs.get("size") or processor.image_processor.size)["longest_edge"]
    return [(longest, longest)]


_IMAGE = Modality(
    fields={"pixel_values": whole, "pixel_attention_mask": whole},
    size_outputs=_size_outputs,
    largest=_largest,
    # The processor takes a list of images for each sample.
    run=lambda processor, image, kwargs: run_image(processor, [image], kwargs),
)


def _clip_outputs(processor: HFProcessor, num_frames: int, height: int, width: int, kwargs: Kwargs) -> Outputs:
    return {"pixel_values": blank_pixels(1, num_frames), "video_metadata": [size_metadata(num_frames)]}


def _most_frames(processor: HFProcessor) -> int:
    """Returns the most sampled frames, which checkpoints call `max_frames`."""
    return int(processor.video_processor.num_frames)


def _longest_clip(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    return [(min(_most_frames(processor), kwargs["max_frames"]), 336, 336)]


# Frames take the same token as tiles.
_VIDEO = replace(
    FIXED_FRAMES,
    fields={"pixel_values": first_row, "pixel_attention_mask": first_row},
    embed_token=lambda processor: processor.image_token,
    size_outputs=_clip_outputs,
    largest=_longest_clip,
    options=clip_options(_most_frames),
)

IDEFICS3 = ProcessorFamily(processor_class="Idefics3Processor", modalities={"image": _IMAGE})
SMOLVLM = ProcessorFamily(processor_class="SmolVLMProcessor", modalities={"image": _IMAGE, "video": _VIDEO})
