"""LLaVA 1.5: every picture is resized to one size and takes a fixed number of positions."""

from preprocess.models.family import ProcessorFamily

LLAVA = ProcessorFamily(item_fields=("pixel_values",))
