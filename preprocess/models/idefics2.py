"""Idefics2: the text around a picture depends on its neighbours. Adjacent pictures share the mark between them, and a
word directly behind a picture gets a space before it."""

import re
from dataclasses import replace

from transformers import PreTrainedConfig
from transformers.utils.chat_template_utils import _CONTROL_TOKEN_START as _TYPED

from raylens.preprocess.field_layout import Outputs
from raylens.preprocess.models.family import HFProcessor, Kwargs, ProcessorFamily
from raylens.preprocess.models.found import find_processor_family


def _with_marks(processor: HFProcessor, text: str) -> str:
    """Returns the text with the marks around each picture. A client's expanded prompt has them already."""
    mark, picture = processor.fake_image_token, processor.image_token
    if f"{mark}{picture}" not in text:
        # In a chat, a user's own "<image>" is ordinary text.
        marked = re.sub(f"(?<!{_TYPED}){re.escape(picture)}", f"{mark}{picture}{mark}", text)
        text = marked.replace(mark * 2, mark)
    return re.sub(rf"(?<!{_TYPED}){re.escape(mark)}(?=[^\s<])", f"{mark} ", text)


def idefics2(config: PreTrainedConfig) -> ProcessorFamily:
    family = find_processor_family(config)
    image = family.modalities["image"]

    def between_marks(processor: HFProcessor, outputs: Outputs, kwargs: Kwargs) -> str:
        mark = processor.fake_image_token
        return image.expansion(processor, outputs, kwargs).removeprefix(mark).removesuffix(mark)

    return replace(family, modalities={"image": replace(image, expansion=between_marks)}, rewrite_text=_with_marks)
