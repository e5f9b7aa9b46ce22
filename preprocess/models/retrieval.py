"""ColPali and ColQwen2: a page is a picture, a query is a text, and each has a frame of the processor's."""

from raylens.preprocess.models.family import FIXED_IMAGE, HFProcessor, InputFrames, ProcessorFamily
from raylens.preprocess.models.qwen2_vl import QWEN2_VL

_NUM_AUGMENTATION_TOKENS = 10
"""As in transformers' `process_queries`: tokens behind a query in which the model thinks it over."""


def _query(processor: HFProcessor, text: str) -> str:
    return f"{processor.query_prefix}{text}{processor.query_augmentation_token * _NUM_AUGMENTATION_TOKENS}\n"


def _colpali_page(processor: HFProcessor) -> str:
    return f"{processor.image_token}{processor.tokenizer.bos_token}{processor.visual_prompt_prefix}\n"


COLPALI = ProcessorFamily(
    processor_class="ColPaliProcessor",
    modalities={"image": FIXED_IMAGE},
    input_frames=InputFrames(
        query=lambda processor, text: processor.tokenizer.bos_token + _query(processor, text), page=_colpali_page
    ),
)
COLQWEN2 = ProcessorFamily(
    processor_class="ColQwen2Processor",
    modalities={"image": QWEN2_VL.modalities["image"]},
    input_frames=InputFrames(query=_query, page=lambda processor: str(processor.visual_prompt_prefix)),
)
