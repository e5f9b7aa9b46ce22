"""What differs between model families in the vision half, by `model_type`."""

from encoder.models.family import VisionFamily, VisionModality
from encoder.models.llava import LLAVA

FAMILIES: dict[str, VisionFamily] = {"llava": LLAVA}

__all__ = ["FAMILIES", "VisionFamily", "VisionModality"]
