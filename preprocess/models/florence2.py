"""Florence-2: one picture, then the text between BOS and EOS. Names of tasks are replaced by sentences."""

from dataclasses import replace

from raylens.preprocess.models.family import FIXED_IMAGE, HFProcessor, ProcessorFamily
from raylens.preprocess.prompt_updates import FrameInsertion, Position, PromptInsertion
from raylens.preprocess.schema import InvalidRequestError


def _frame(processor: HFProcessor) -> tuple[FrameInsertion, ...]:
    bos = FrameInsertion(processor.tokenizer.bos_token, Position.AFTER_ITEMS, with_items_only=True)
    return bos, FrameInsertion(processor.tokenizer.eos_token, Position.END, with_items_only=True)


def _spell_out_task(processor: HFProcessor, text: str) -> str:
    try:
        (sentence,) = processor._construct_prompts(text)
    except ValueError as error:
        # The message names the task only.
        raise InvalidRequestError(str(error), field="prompt", code="invalid_task") from error
    return str(sentence)


FLORENCE2 = ProcessorFamily(
    processor_class="Florence2Processor",
    modalities={
        "image": replace(FIXED_IMAGE, update=lambda processor: PromptInsertion(Position.START), max_items=1),
    },
    frame=_frame,
    rewrite_text=_spell_out_task,
)
