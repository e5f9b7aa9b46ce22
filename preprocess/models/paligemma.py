"""PaliGemma: pictures, then BOS, the prompt and a newline. A prompt needs a picture."""

from dataclasses import replace

from raylens.preprocess.models.family import FIXED_IMAGE, HFProcessor, ProcessorFamily, image_token
from raylens.preprocess.prompt_updates import FrameInsertion, Position, PromptReplacement


def _frame(processor: HFProcessor) -> tuple[FrameInsertion, ...]:
    bos = FrameInsertion(processor.tokenizer.bos_token, Position.AFTER_ITEMS, with_items_only=True)
    return bos, FrameInsertion("\n", Position.END, with_items_only=True)


PALIGEMMA = ProcessorFamily(
    processor_class="PaliGemmaProcessor",
    modalities={
        "image": replace(
            FIXED_IMAGE,
            update=lambda processor: PromptReplacement(image_token(processor), otherwise=Position.START),
        )
    },
    frame=_frame,
    requires_items=True,
)
