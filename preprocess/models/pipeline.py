"""The family of a text model that a multimodal pipeline gives eyes: pictures go to the pipeline as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AddedToken, AutoTokenizer, ProcessorMixin

from pipelines.interface import MultimodalPipeline, PipelineParams
from preprocess.field_layout import Batched, Outputs
from preprocess.models.family import (
    HFProcessor,
    Kwargs,
    Modality,
    ProcessorFamily,
    any_size,
    image_token,
    replaces_image_token,
)

_IMAGE_TOKEN = "<image>"


class PipelineProcessor(ProcessorMixin):
    """A text model's tokenizer, with a token more for the place of a picture.

    Chat templates of text models take texts only. So a message's pictures become placeholders in its text, each with
    the pipeline's markers around it."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        tokenizer.add_tokens([AddedToken(_IMAGE_TOKEN, normalized=False, special=True)])
        self.image_token = _IMAGE_TOKEN
        self.marks = ("", "")
        self.identity = ""
        super().__init__(tokenizer, chat_template=chat_template)

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            [{**message, "content": self._flat(message.get("content"))} for message in conversation], *args, **kwargs
        )

    def _flat(self, content: Any) -> Any:
        """Returns the parts of a message as one text. A picture stands on a line of its own."""
        if not isinstance(content, list):
            return content
        before, after = self.marks
        pieces = [
            f"{before}{self.image_token}{after}\n" if part["type"] == "image" else part.get("text", "")
            for part in content
        ]
        return "".join(pieces)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads the tokenizer of a checkpoint for a pipeline."""

    pipeline: MultimodalPipeline
    params: PipelineParams

    def from_pretrained(self, model: str, *, revision: str | None = None, backend: str = "pil") -> PipelineProcessor:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
        processor = PipelineProcessor(tokenizer)
        pipeline = self.pipeline
        processor.marks = (pipeline.image_start(), pipeline.image_end())
        processor.identity = f"{pipeline.name()} {pipeline.num_image_embeds()} {sorted(self.params.items())}"
        return processor


def pipeline_family(pipeline: MultimodalPipeline, params: PipelineParams) -> ProcessorFamily:
    """Returns the family of text models with this pipeline, which was made with `params`."""
    num_embeds = pipeline.num_image_embeds()

    def expansion(processor: HFProcessor, outputs: Outputs, index: int, kwargs: Kwargs) -> str:
        return _IMAGE_TOKEN * num_embeds

    image = Modality(
        fields={"pixels": Batched()},
        content_fields=("pixels",),
        update=replaces_image_token,
        embed_token=image_token,
        marks=(pipeline.image_start(), pipeline.image_end()),
        size_outputs=lambda processor, height, width, kwargs: {},
        largest=any_size,
        run=_pixels,
        expansion=expansion,
    )
    return ProcessorFamily(
        processor_class=_Loader(pipeline, params),
        modalities={"image": image},
        placeholder_id=pipeline.placeholder_token_id(),
        backends=("pil",),
    )


def _pixels(processor: HFProcessor, images: Sequence[Any], kwargs: Kwargs) -> Outputs:
    """Returns each picture's bytes, (height, width, 3) uint8."""
    return {"pixels": [torch.from_numpy(np.array(image.convert("RGB"))) for image in images]}
