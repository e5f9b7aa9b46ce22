"""The families that resize every picture to one size, with a fixed number of tokens. Their frames differ."""

from dataclasses import replace

from transformers.models.janus.processing_janus import DEFAULT_SYSTEM_PROMPT

from raylens.preprocess.field_layout import Outputs, blank_pixels
from raylens.preprocess.models.family import FIXED_IMAGE, HFProcessor, Kwargs, ProcessorFamily, audio_token, image_token
from raylens.preprocess.models.found import sound_modality
from raylens.preprocess.prompt_updates import FrameInsertion, Position, PromptInsertion, PromptReplacement
from raylens.preprocess.schema import InvalidRequestError

DEEPSEEK_VL = ProcessorFamily(processor_class="DeepseekVLProcessor", modalities={"image": FIXED_IMAGE})
GEMMA3N = ProcessorFamily(
    processor_class="Gemma3nProcessor",
    modalities={
        "image": FIXED_IMAGE,
        "audio": sound_modality(audio_token, ("input_features", "input_features_mask")),
    },
)

CHAMELEON = ProcessorFamily(
    processor_class="ChameleonProcessor",
    modalities={"image": FIXED_IMAGE},
    frame=lambda processor: (FrameInsertion(processor.tokenizer.sep_token, Position.END),),
)


def _llava_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    crop = processor.image_processor.crop_size
    return {"pixel_values": blank_pixels(1, 3, crop["height"], crop["width"])}


LLAVA = ProcessorFamily(
    processor_class="LlavaProcessor", modalities={"image": replace(FIXED_IMAGE, size_outputs=_llava_outputs)}
)


def _janus_frame(processor: HFProcessor) -> tuple[FrameInsertion, ...]:
    """Some checkpoints need a system prompt before every prompt."""
    if not processor.use_default_system_prompt:
        return ()
    return (FrameInsertion(DEFAULT_SYSTEM_PROMPT, Position.AFTER_PREFIX),)


JANUS = ProcessorFamily(processor_class="JanusProcessor", modalities={"image": FIXED_IMAGE}, frame=_janus_frame)


def _bos_and(processor: HFProcessor, end: str) -> tuple[FrameInsertion, ...]:
    """Returns a frame of BOS between items and text, and `end` after the text."""
    bos = FrameInsertion(processor.tokenizer.bos_token, Position.AFTER_ITEMS, with_items_only=True)
    return bos, FrameInsertion(end, Position.END, with_items_only=True)


PALIGEMMA = ProcessorFamily(
    processor_class="PaliGemmaProcessor",
    modalities={
        "image": replace(
            FIXED_IMAGE,
            update=lambda processor: PromptReplacement(image_token(processor), otherwise=Position.START),
        )
    },
    frame=lambda processor: _bos_and(processor, "\n"),
    requires_items=True,
)


def _spell_out_task(processor: HFProcessor, text: str) -> str:
    """Replaces the name of a task by its sentence."""
    try:
        (sentence,) = processor._construct_prompts(text)
    except ValueError as error:
        # The message names the task only.
        raise InvalidRequestError(str(error), field="prompt", code="invalid_task") from error
    return str(sentence)


_TEXTS_ONLY = (
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
"""A chat template for a model of single questions."""

FLORENCE2 = ProcessorFamily(
    processor_class="Florence2Processor",
    modalities={"image": replace(FIXED_IMAGE, update=lambda processor: PromptInsertion(Position.START), max_items=1)},
    frame=lambda processor: _bos_and(processor, processor.tokenizer.eos_token),
    rewrite_text=_spell_out_task,
    chat_template=_TEXTS_ONLY,
)


BLIP_2 = ProcessorFamily(
    processor_class="Blip2Processor",
    modalities={
        "image": replace(
            FIXED_IMAGE,
            # Query tokens precede the prompt, even its BOS.
            update=lambda processor: PromptInsertion(Position.START, tokenized_apart=True),
            run=lambda processor, image, kwargs: processor.image_processor([image], **kwargs),
            expansion=lambda processor, outputs, kwargs: image_token(processor) * processor.num_query_tokens,
            max_items=1,
        )
    },
)
