"""Emu3: a prompt has one picture. Its processor pads several to the size of the largest, and the padding changes the
tokens of the others."""

from dataclasses import replace

from transformers import PreTrainedConfig

from raylens.preprocess.models.family import ProcessorFamily
from raylens.preprocess.models.found import find_processor_family


def emu3(config: PreTrainedConfig) -> ProcessorFamily:
    family = find_processor_family(config)
    return replace(family, modalities={"image": replace(family.modalities["image"], max_items=1)})
