"""Gemma 3n: pictures of one size, a fixed number of tokens each. (Its audio has no place in this pipeline.)"""

from preprocess.models.family import FIXED_IMAGE, ProcessorFamily

GEMMA3N = ProcessorFamily(processor_class="Gemma3nProcessor", modalities={"image": FIXED_IMAGE})
