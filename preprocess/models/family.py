"""A model family's declaration for the processor, with the defaults that fit most families."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from PIL import Image

from raylens.preprocess.field_layout import Fields, Outputs, first_row
from raylens.preprocess.media import MediaLimits, decode_image
from raylens.preprocess.prompt_updates import FrameInsertion, PromptReplacement, PromptUpdate
from raylens.preprocess.schema import ItemTensors, invalid_option

HFProcessor: TypeAlias = Any
"""The model's Hugging Face processor (a ProcessorMixin), which is not typed."""

Kwargs: TypeAlias = Mapping[str, Any]
"""Keyword arguments of the Hugging Face processor's part for the modality."""

Option: TypeAlias = Callable[[HFProcessor, object], Kwargs]
"""A setting that a client may change per request: maps its value to keyword arguments. Raises InvalidRequestError for a
value of a wrong type or out of bounds."""

Size: TypeAlias = tuple[int, ...]
"""(height, width) in pixels of a picture, (num_frames, height, width) of a video, (num_samples,) of a sound."""

Backend: TypeAlias = Literal["pil", "torchvision"]
"""The library that resizes and normalises pictures: Pillow with numpy, or torchvision."""

DEFAULT_FRAMES = "default_frames"
"""The keyword argument with the most frames of a video, if neither request nor processor sets a number or a rate."""


def run_image(processor: HFProcessor, image: Any, kwargs: Kwargs) -> Outputs:
    """Runs the image processor on one picture, or on a list of the pictures of one sample."""
    outputs, _ = processor._process_images([image], **kwargs)
    return outputs  # type: ignore[no-any-return]


def run_unpadded(processor: HFProcessor, image: Any, kwargs: Kwargs) -> Outputs:
    """The same as `run_image`, for processors that would pad to a batch's largest picture."""
    return run_image(processor, image, {**kwargs, "do_pad": False, "return_tensors": None})


def image_token(processor: HFProcessor) -> str:
    return str(processor.image_token)


def audio_token(processor: HFProcessor) -> str:
    return str(processor.audio_token)


def replace_image_token(processor: HFProcessor, outputs: Outputs, kwargs: Kwargs) -> str:
    """Returns the Hugging Face processor's replacement for the placeholder of an image."""
    return str(processor.replace_image_token(outputs, image_idx=0, **kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """The processing of one modality. Functions get the Hugging Face processor first.

    `fields`: the outputs that make up an item.
    `update`: the place of the items in the prompt.
    `embed_token`: the token at positions with an item's embeddings.
    `marks`: the chat template's text before and after an item's placeholder.
    `size_outputs`: the outputs that `expansion` reads, for an item of a size, computed without pixels; takes the
    processor, the numbers of the Size and the keyword arguments.
    `largest`: candidates for the size with the most tokens; no image has more tokens than the best of them. For videos,
    the keyword arguments hold the limit of frames, as `max_frames`; for sounds that of seconds, as `max_duration_s`.
    `decode`: turns encoded bytes into the input of `run`; raises InvalidRequestError. Replace it to add a file format.
    `blank`: a black item of a size, in the form of `decode`.
    `run`: processes a decoded item, into outputs.
    `expansion`: the item's text in the prompt.
    `ordinal`: control tokens before the prompt's `index`-th item of the modality, from 0.
    `feature_tokens`: further tokens that count as the item's features, though they keep their own embedding.
    `pack` / `unpack`: convert an item's tensors from the processor's form to a smaller, stored form, and back.
    `max_items`: the most items of a prompt; None: any number.
    `language_fields`: the fields that the language model needs beside an item's embeddings, e.g. for positions.
    `derived_fields`: floating-point fields that follow from an item's size, as integer fields do by default.
    `content_fields`: integer fields that do not follow from the size.
    `options`: settings that a client may change per request, by name; `largest_options`: option values that make an
    item larger than the model's own settings do.
    `among_others`: replaces this declaration if the prompt has more than one item of the modality."""

    fields: Fields
    update: Callable[[HFProcessor], PromptUpdate] = lambda processor: PromptReplacement(image_token(processor))
    embed_token: Callable[[HFProcessor], str] = image_token
    marks: tuple[str, str] = ("", "")
    size_outputs: Callable[..., Outputs]
    largest: Callable[[HFProcessor, Kwargs], Sequence[Size]]
    decode: Callable[[HFProcessor, bytes, MediaLimits, Kwargs], Any] = lambda processor, content, limits, kwargs: (
        decode_image(content, limits=limits)
    )
    blank: Callable[[Size], Any] = lambda size: Image.new("RGB", (size[1], size[0]))
    run: Callable[[HFProcessor, Any, Kwargs], Outputs] = run_image
    expansion: Callable[[HFProcessor, Outputs, Kwargs], str] = replace_image_token
    ordinal: Callable[[HFProcessor, int], str] = lambda processor, index: ""
    feature_tokens: Callable[[HFProcessor], tuple[str, ...]] = lambda processor: ()
    pack: Callable[[HFProcessor, ItemTensors], ItemTensors] = lambda processor, tensors: tensors
    unpack: Callable[[HFProcessor, ItemTensors], ItemTensors] = lambda processor, tensors: tensors
    max_items: int | None = None
    language_fields: tuple[str, ...] = ()
    derived_fields: tuple[str, ...] = ()
    content_fields: tuple[str, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    largest_options: Mapping[str, object] = field(default_factory=dict)
    among_others: "Modality | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFrames:
    """The prompts of a model that embeds pages and queries. `query`: of a text. `page`: of a picture, with its
    placeholder."""

    query: Callable[[HFProcessor, str], str]
    page: Callable[[HFProcessor], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFamily:
    """`processor_class`: the name of a class in transformers, or an object with `from_pretrained`.

    `modalities`: by name. `frame`: see FrameInsertion. `keeps_special_tokens`: whether a prompt with items keeps the
    tokenizer's own BOS and EOS. `requires_items`: whether the model rejects prompts without items.
    `rewrite_text`: changes a prompt's text before all other steps. `mend`: repairs a loaded processor. `backends`: the
    back ends of the family's processor in transformers. `placeholder_id`: the token id at positions of embeddings in
    finished prompts; None: the embed token's. `typed_placeholder`: the client's text for a picture, if it is not a
    token; in a prompt without media it is ordinary text. `chat_template`: for a checkpoint that has none.
    `items_fill_context`: whether an item's tokens take positions of the language model; else only the first does.
    `input_frames`: of what the model embeds; None: the checkpoint's files tell them."""

    processor_class: Any
    modalities: Mapping[str, Modality]
    frame: Callable[[HFProcessor], tuple[FrameInsertion, ...]] = lambda processor: ()
    keeps_special_tokens: bool = True
    requires_items: bool = False
    rewrite_text: Callable[[HFProcessor, str], str] | None = None
    mend: Callable[[HFProcessor], None] = lambda processor: None
    backends: tuple[Backend, ...] = ("pil", "torchvision")
    placeholder_id: int | None = None
    typed_placeholder: str | None = None
    chat_template: str | None = None
    items_fill_context: bool = True
    input_frames: InputFrames | None = None


FIXED_IMAGE = Modality(
    fields={"pixel_values": first_row},
    size_outputs=lambda processor, height, width, kwargs: {},
    largest=lambda processor, kwargs: [(336, 336)],
)
"""Every picture is resized to one size, so all pictures have the same expansion in the prompt."""


def bounded(*names: str, bounds: Callable[[HFProcessor], tuple[int, int]] | None = None) -> dict[str, Option]:
    """Returns integer options by name. `bounds`: their least and most; None: 1 and the image processor's own setting of
    the option's name."""

    def option(name: str) -> Option:
        def parse(processor: HFProcessor, value: object) -> Kwargs:
            least, most = bounds(processor) if bounds else (1, getattr(processor.image_processor, name))
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise invalid_option(name, f"must be a whole number from {least} to {most}")
            return {name: value}

        return parse

    return {name: option(name) for name in names}
