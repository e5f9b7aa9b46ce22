"""BLIP-2: a fixed number of query tokens precedes the prompt, even its BOS."""

from dataclasses import replace

from raylens.preprocess.field_layout import Outputs
from raylens.preprocess.models.family import FIXED_IMAGE, HFProcessor, Kwargs, ProcessorFamily
from raylens.preprocess.prompt_updates import Position, PromptInsertion


def _run(processor: HFProcessor, images: object, kwargs: Kwargs) -> Outputs:
    outputs: Outputs = processor.image_processor(images, **kwargs)
    return outputs


def _image_token(processor: HFProcessor) -> str:
    return str(processor.image_token.content)


BLIP_2 = ProcessorFamily(
    processor_class="Blip2Processor",
    modalities={
        "image": replace(
            FIXED_IMAGE,
            update=lambda processor: PromptInsertion(Position.START, tokenized_apart=True),
            embed_token=_image_token,
            run=_run,
            expansion=lambda processor, outputs, index, kwargs: _image_token(processor) * processor.num_query_tokens,
            max_items=1,
        )
    },
)
