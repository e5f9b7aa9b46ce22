"""Janus: fixed numbers of tokens between two marks; some checkpoints need a system prompt before every prompt."""

from transformers.models.janus.processing_janus import DEFAULT_SYSTEM_PROMPT

from raylens.preprocess.models.family import FIXED_IMAGE, HFProcessor, ProcessorFamily
from raylens.preprocess.prompt_updates import FrameInsertion, Position


def _frame(processor: HFProcessor) -> tuple[FrameInsertion, ...]:
    if not processor.use_default_system_prompt:
        return ()
    return (FrameInsertion(DEFAULT_SYSTEM_PROMPT, Position.AFTER_PREFIX),)


JANUS = ProcessorFamily(processor_class="JanusProcessor", modalities={"image": FIXED_IMAGE}, frame=_frame)
