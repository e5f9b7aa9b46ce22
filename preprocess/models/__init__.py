"""What differs between model families in preprocessing, one file a `model_type`."""

from preprocess.models.family import ProcessorFamily
from preprocess.models.llava import LLAVA

FAMILIES: dict[str, ProcessorFamily] = {"llava": LLAVA}

__all__ = ["FAMILIES", "ProcessorFamily"]
