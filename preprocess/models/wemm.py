"""WeMM: pictures keep their aspect ratio, and take a position for each 4 x 4 patches and one for each splitter.

transformers has no image processor and no processor for WeMM. Both are written from the published model's description.
"""

import math
from typing import Any

import numpy as np
from transformers import AddedToken, AutoTokenizer, BatchFeature, Idefics2ImageProcessorPil, ProcessorMixin
from transformers.image_utils import SizeDict

from raylens.modeling.model_configs import load_model_config
from raylens.preprocess.field_layout import Outputs, first_row
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, Size

_NUM_SPLITTERS = 2
_CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if not loop.first and message['role'] == 'user' -%}{{- '\\n' -}}{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- '<image>\\n' -}}"
    "{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""The form of the model's training: each picture on a line of its own, and a line break only before a later turn of the
user."""


class WemmImageProcessor(Idefics2ImageProcessorPil):
    """Resizes pictures, normalises them as Idefics2 does, and pads them to whole patches.

    The longer side of every picture becomes `longest_edge`, even of a smaller picture. Idefics2 only shrinks pictures.

    Returns `pixel_values` (num_pictures, 3, height, width) and `patch_attention_mask` (num_pictures, rows, columns),
    bool, True for patches with a pixel of the picture. Smaller pictures are padded to the call's largest."""

    size = {"shortest_edge": 756, "longest_edge": 1960}
    patch_size = 14
    model_input_names = ("pixel_values", "patch_attention_mask")

    def resize(self, image: Any, size: SizeDict, *args: Any, **kwargs: Any) -> Any:
        height, width = image.shape[-2:]
        new_height, new_width = _resized(height, width, size)
        return super().resize(image, SizeDict(height=new_height, width=new_width), *args, **kwargs)

    def _preprocess(self, images: list[list[Any]], **settings: Any) -> BatchFeature:
        return_tensors = settings.pop("return_tensors")
        resized = super()._preprocess(images, **{**settings, "do_pad": False}, return_tensors=None)["pixel_values"]
        flat = [image for sample in resized for image in sample]
        grids = [[math.ceil(side / self.patch_size) for side in image.shape[1:]] for image in flat]
        rows, columns = (max(sides) for sides in zip(*grids, strict=True))
        pixels = np.zeros((len(flat), 3, rows * self.patch_size, columns * self.patch_size), dtype=np.float32)
        mask = np.zeros((len(flat), rows, columns), dtype=np.bool_)
        for index, (image, (own_rows, own_columns)) in enumerate(zip(flat, grids, strict=True)):
            pixels[index, :, : image.shape[1], : image.shape[2]] = image
            mask[index, :own_rows, :own_columns] = True
        return BatchFeature({"pixel_values": pixels, "patch_attention_mask": mask}, tensor_type=return_tensors)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of patches of a picture of this size in pixels."""
        sides = _resized(height, width, SizeDict(**dict(self.size)))
        rows, columns = (math.ceil(side / self.patch_size) for side in sides)
        return rows, columns


def _resized(height: int, width: int, size: SizeDict) -> tuple[int, int]:
    """Returns the height and width after resizing. The longer side becomes `longest_edge`; the shorter one keeps the
    aspect ratio, but is at least `shortest_edge`."""
    aspect_ratio = width / height  # rounded as in the published code
    if width >= height:
        width, height = size.longest_edge, int(size.longest_edge / aspect_ratio)
    else:
        width, height = int(size.longest_edge * aspect_ratio), size.longest_edge
    return max(height, size.shortest_edge), max(width, size.shortest_edge)


class WemmProcessor(ProcessorMixin):
    """Puts a placeholder into a text for each embedding of its pictures.

    The published tokenizer has no placeholder; this class adds one at the end of the vocabulary."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None, stride: int = 4) -> None:
        """`stride`: the number of patches joined along each side."""
        self.image_token = "<image>"
        tokenizer.add_tokens([AddedToken(self.image_token, normalized=False, special=True)])
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.stride = stride
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def from_pretrained(cls, model: str, *, revision: str | None = None, backend: str = "pil") -> "WemmProcessor":
        config = load_model_config(model, revision)
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
        image_processor = WemmImageProcessor.from_dict(config.image_processor)
        image_processor.patch_size = config.vision_config.patch_size
        # The tokenizer may have the text model's template, which does not support pictures.
        template = tokenizer.chat_template
        if not isinstance(template, str) or "image" not in template:
            template = _CHAT_TEMPLATE
        return cls(image_processor, tokenizer, chat_template=template, stride=config.downsampler_config["stride"])

    def replace_image_token(self, image_inputs: Outputs, image_idx: int, **kwargs: Any) -> str:
        mask = image_inputs["patch_attention_mask"][image_idx]
        rows, columns = int(mask[:, 0].sum()), int(mask[0].sum())  # without padding
        return str(self.image_token * self.num_embeds(rows, columns))

    def num_embeds(self, rows: int, columns: int) -> int:
        """Returns the number of positions of a picture with so many rows and columns of patches."""
        return math.ceil(rows / self.stride) * math.ceil(columns / self.stride) + _NUM_SPLITTERS


def _size_outputs(processor: HFProcessor, height: int, width: int, kwargs: Kwargs) -> Outputs:
    grid = processor.image_processor.grid(height, width)
    return {"patch_attention_mask": np.ones((1, *grid), dtype=np.bool_)}


def _largest(processor: HFProcessor, kwargs: Kwargs) -> list[Size]:
    longest = processor.image_processor.size["longest_edge"]
    return [(longest, longest)]


WEMM = ProcessorFamily(
    processor_class=WemmProcessor,
    modalities={
        "image": Modality(
            fields={"pixel_values": first_row, "patch_attention_mask": first_row},
            size_outputs=_size_outputs,
            largest=_largest,
        )
    },
    backends=("pil",),
)
