"""Gemma 3n: pictures of one size, with a fixed number of tokens each. Audio is not supported."""

from raylens.preprocess.models.family import FIXED_IMAGE, ProcessorFamily

GEMMA3N = ProcessorFamily(processor_class="Gemma3nProcessor", modalities={"image": FIXED_IMAGE})
