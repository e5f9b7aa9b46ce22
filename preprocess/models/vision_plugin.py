"""The family of a text model with a vision plug-in: pictures go to the plug-in as they are."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image
from transformers import AddedToken, AutoTokenizer, ProcessorMixin

from raylens.preprocess.field_layout import Outputs, whole
from raylens.preprocess.models.family import FIXED_IMAGE, HFProcessor, Kwargs, ProcessorFamily
from raylens.preprocess.vision_plugins.interface import PluginParams, VisionPlugin

_IMAGE_TOKEN = "\U000f0002image"
"""Begins with a character for private use: the text model's tokenizer has no such token, so what people type stays text
and merges with the text around it."""


class VisionPluginProcessor(ProcessorMixin):
    """A text model's tokenizer, with a token more for the place of a picture."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        tokenizer.add_tokens([AddedToken(_IMAGE_TOKEN, normalized=False, special=True)])
        self.image_token = _IMAGE_TOKEN
        self.identity = ""
        super().__init__(tokenizer, chat_template=chat_template)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads the tokenizer of a checkpoint for a pipeline."""

    plugin: VisionPlugin
    params: PluginParams

    def from_pretrained(
        self, model: str, *, revision: str | None = None, backend: str = "pil"
    ) -> VisionPluginProcessor:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
        processor = VisionPluginProcessor(tokenizer)
        plugin = self.plugin
        processor.identity = f"{plugin.name()} {plugin.num_image_embeds()} {sorted(self.params.items())}"
        return processor


def plugin_family(plugin: VisionPlugin, params: PluginParams) -> ProcessorFamily:
    """Returns the family of text models with this plug-in, which was made with `params`."""
    num_embeds = plugin.num_image_embeds()
    image = replace(
        FIXED_IMAGE,
        fields={"pixels": whole},
        content_fields=("pixels",),
        marks=(plugin.image_start(), plugin.image_end()),
        run=_pixels,
        expansion=lambda processor, outputs, kwargs: _IMAGE_TOKEN * num_embeds,
    )
    return ProcessorFamily(
        processor_class=_Loader(plugin, params),
        modalities={"image": image},
        placeholder_id=plugin.placeholder_token_id(),
        backends=("pil",),
        typed_placeholder="<image>",
    )


def _pixels(processor: HFProcessor, image: Image.Image, kwargs: Kwargs) -> Outputs:
    """Returns the picture's bytes, (height, width, 3) uint8."""
    return {"pixels": np.array(image.convert("RGB"))}
