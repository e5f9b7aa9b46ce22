"""BLIP-2: a fixed number of query tokens stands before the prompt, before BOS even."""

from preprocess.field_layout import Batched, Outputs
from preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, any_size, fixed_side
from preprocess.prompt_updates import Position, PromptInsertion


def _run(processor: HFProcessor, images: object, kwargs: Kwargs) -> Outputs:
    outputs: Outputs = processor.image_processor(images, **kwargs)
    return outputs


def _image_token(processor: HFProcessor) -> str:
    return str(processor.image_token.content)


BLIP_2 = ProcessorFamily(
    processor_class="Blip2Processor",
    modalities={
        "image": Modality(
            fields={"pixel_values": Batched()},
            update=lambda processor: PromptInsertion(Position.START, tokenized_apart=True),
            embed_token=_image_token,
            size_outputs=lambda processor, height, width, kwargs: {},
            largest=any_size,
            fixed_side=fixed_side,
            run=_run,
            expansion=lambda processor, outputs, index, kwargs: _image_token(processor) * processor.num_query_tokens,
            max_items=1,
        )
    },
)
