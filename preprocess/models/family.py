"""A model family's declaration for the processor, with the defaults that fit most families."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from raylens.preprocess.field_layout import Batched, Fields, Outputs
from raylens.preprocess.media import MediaLimits, decode_image
from raylens.preprocess.prompt_updates import FrameInsertion, PromptReplacement, PromptUpdate
from raylens.preprocess.schema import InvalidRequestError, ItemTensors

HFProcessor: TypeAlias = Any
"""The model's Hugging Face processor (a ProcessorMixin), which is not typed."""

Kwargs: TypeAlias = Mapping[str, Any]
"""Keyword arguments of the Hugging Face image or video processor."""

Option: TypeAlias = Callable[[HFProcessor, object], Kwargs]
"""A setting that a client may change per request: takes its value, returns the keyword arguments that it stands for.
Raises InvalidRequestError for a value of another type or out of bounds."""

Size: TypeAlias = tuple[int, ...]
"""(height, width) in pixels of a picture, (num_frames, height, width) of a video."""

Backend: TypeAlias = Literal["pil", "torchvision"]
"""The library that resizes and normalises pictures: Pillow with numpy, or torchvision."""

DEFAULT_FRAMES = "default_frames"
"""The keyword argument of videos that holds the most frames where neither the request nor the processor names a number
or a rate."""

RAGGED = Batched(shape=lambda outputs, index: ())
"""The layout of the outputs that `run_ragged_images` leaves unpadded. Merging pads them to the batch's largest item."""


def run_images(processor: HFProcessor, images: Sequence[Any], kwargs: Kwargs) -> Outputs:
    """Runs the image processor on one prompt's worth of images."""
    outputs, _ = processor._process_images(list(images), **kwargs)
    return outputs  # type: ignore[no-any-return]


def run_nested_images(processor: HFProcessor, images: Sequence[Any], kwargs: Kwargs) -> Outputs:
    """The same as `run_images`, for processors that take the images sample by sample."""
    return run_images(processor, [list(images)], kwargs)


def run_ragged_images(processor: HFProcessor, images: Sequence[Any], kwargs: Kwargs) -> Outputs:
    """The same as `run_images`, for processors that pad to the batch's largest. Returns lists of each image's own
    tensors."""
    return run_images(processor, images, {**kwargs, "do_pad": False, "return_tensors": None})


def replace_image_token(processor: HFProcessor, outputs: Outputs, index: int, kwargs: Kwargs) -> str:
    """Returns the text that the Hugging Face processor puts in place of image `index`'s placeholder."""
    text: str = processor.replace_image_token(outputs, image_idx=index, **kwargs)
    return text


def replace_video_token(processor: HFProcessor, outputs: Outputs, index: int, kwargs: Kwargs) -> str:
    text: str = processor.replace_video_token(outputs, video_idx=index, **kwargs)
    return text


def decode_picture(processor: HFProcessor, content: bytes, limits: MediaLimits, kwargs: Kwargs) -> Any:
    return decode_image(content, limits=limits)


def blank_picture(size: Size) -> Image.Image:
    height, width = size
    return Image.new("RGB", (width, height))


def unchanged(processor: HFProcessor, tensors: ItemTensors) -> ItemTensors:
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """How one kind of media is processed. Functions get the Hugging Face processor first.

    `fields`: how its outputs split into items.
    `update`: where the items go in the prompt.
    `embed_token`: the token whose positions take an item's embeddings.
    `marks`: what the model's chat template writes before and after an item's placeholder.
    `size_outputs`: outputs for an item of a size as far as `expansion` looks at them, without pixels; takes the
    processor, the numbers of the Size and the keyword arguments.
    `largest`: candidates for the size with the most tokens; no size of image has more than the best of them. For
    videos, the keyword arguments hold the most frames that the limits let through, as `max_frames`.
    `decode`: encoded bytes to what `run` takes; raises InvalidRequestError. A parser of one's own makes a new modality.
    `blank`: a black item of a size, as `decode` returns it.
    `run`: processes decoded items together, into outputs.
    `expansion`: the text that item `index` of some outputs becomes.
    `ordinal`: control tokens in front of the item that is a prompt's first, second, ... of the modality, from 0.
    `feature_tokens`: further tokens that count as the item's features, though they keep their own embedding.
    `pack` / `unpack`: an item's tensors from the processor's form to a smaller one, in which they are kept, and back.
    `max_items`: items that one prompt can hold, None: any number.
    `language_fields`: the fields that the language model needs beside an item's embeddings, e.g. for positions.
    `derived_fields`: floating-point fields that follow from an item's size, as all of whole numbers do.
    `content_fields`: fields of whole numbers that do not.
    `options`: settings that a client may change per request, by name; `largest_options`: values of those that make an
    item larger than the model's own settings do.
    `among_others`: what holds instead when the prompt has more than one item of the modality.
    """

    fields: Fields
    update: Callable[[HFProcessor], PromptUpdate]
    embed_token: Callable[[HFProcessor], str]
    marks: tuple[str, str] = ("", "")
    size_outputs: Callable[..., Outputs]
    largest: Callable[[HFProcessor, Kwargs], Sequence[Size]]
    decode: Callable[[HFProcessor, bytes, MediaLimits, Kwargs], Any] = decode_picture
    blank: Callable[[Size], Any] = blank_picture
    run: Callable[[HFProcessor, Sequence[Any], Kwargs], Outputs] = run_images
    expansion: Callable[[HFProcessor, Outputs, int, Kwargs], str] = replace_image_token
    ordinal: Callable[[HFProcessor, int], str] = lambda processor, index: ""
    feature_tokens: Callable[[HFProcessor], tuple[str, ...]] = lambda processor: ()
    pack: Callable[[HFProcessor, ItemTensors], ItemTensors] = unchanged
    unpack: Callable[[HFProcessor, ItemTensors], ItemTensors] = unchanged
    max_items: int | None = None
    language_fields: tuple[str, ...] = ()
    derived_fields: tuple[str, ...] = ()
    content_fields: tuple[str, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    largest_options: Mapping[str, object] = field(default_factory=dict)
    among_others: "Modality | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFamily:
    """`processor_class`: the name of a class in transformers, or an object with `from_pretrained`.

    `modalities`: by name. `frame`: see FrameInsertion. `keeps_special_tokens`: whether a prompt with items keeps the
    BOS and EOS that the tokenizer adds by itself. `requires_items`: whether the model takes no prompt of text alone.
    `rewrite_text`: changes a prompt's text before anything else does. `mend`: repairs a loaded processor. `backends`:
    those for which transformers has the family's processor. `placeholder_id`: the token id that stands in finished
    prompts where an embedding does; None: the embed token's. `typed_placeholder`: what a client writes for a picture
    into a text that media come beside, if that is no token. In every other text it is ordinary text.
    """

    processor_class: Any
    modalities: Mapping[str, Modality]
    frame: Callable[[HFProcessor], tuple[FrameInsertion, ...]] = lambda processor: ()
    keeps_special_tokens: bool = True
    requires_items: bool = False
    rewrite_text: Callable[[HFProcessor, str], str] | None = None
    mend: Callable[[HFProcessor], None] = field(default=lambda processor: None)
    backends: tuple[Backend, ...] = ("pil", "torchvision")
    placeholder_id: int | None = None
    typed_placeholder: str | None = None


def image_token(processor: HFProcessor) -> str:
    return str(processor.image_token)


def video_token(processor: HFProcessor) -> str:
    return str(processor.video_token)


def replaces_image_token(processor: HFProcessor) -> PromptUpdate:
    return PromptReplacement(image_token(processor))


def replaces_video_token(processor: HFProcessor) -> PromptUpdate:
    return PromptReplacement(video_token(processor))


def any_size(processor: HFProcessor, kwargs: Kwargs) -> Sequence[Size]:
    """Returns one size, for families that bring every image to one number of tokens."""
    return [(336, 336)]


def blank_pixels(*shape: int) -> npt.NDArray[np.float32]:
    """Returns an array of the shape that takes no memory, for `size_outputs`."""
    return np.broadcast_to(np.float32(0), shape)


FIXED_IMAGE = Modality(
    fields={"pixel_values": Batched()},
    update=replaces_image_token,
    embed_token=image_token,
    size_outputs=lambda processor, height, width, kwargs: {},
    largest=any_size,
)
"""Every picture is resized to one size, so its place in the prompt does not depend on it."""


def flag(name: str) -> Option:
    """Returns an option that is true or false and has the name of its keyword argument."""

    def parse(processor: HFProcessor, value: object) -> Kwargs:
        if not isinstance(value, bool):
            raise invalid_option(name, "must be true or false")
        return {name: value}

    return parse


def int_option(name: str, *, least: int, most: Callable[[HFProcessor], int]) -> Option:
    """Returns an option that is a whole number within bounds and has the name of its keyword argument."""
    return lambda processor, value: {name: checked_int(name, value, least=least, most=most(processor))}


def checked_int(name: str, value: object, *, least: int, most: int) -> int:
    """Returns `value` if it is a whole number within bounds. Raises InvalidRequestError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise invalid_option(name, f"must be a whole number from {least} to {most}")
    return value


def invalid_option(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(reason, field=f"mm_processor_kwargs.{name}", code="invalid_option")
