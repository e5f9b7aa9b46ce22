"""Chameleon: fixed numbers of tokens between two marks, and a separator that ends every prompt."""

from raylens.preprocess.models.family import FIXED_IMAGE, ProcessorFamily
from raylens.preprocess.prompt_updates import FrameInsertion, Position

CHAMELEON = ProcessorFamily(
    processor_class="ChameleonProcessor",
    modalities={"image": FIXED_IMAGE},
    frame=lambda processor: (FrameInsertion(processor.tokenizer.sep_token, Position.END),),
)
