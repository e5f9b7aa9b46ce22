"""The processing of pictures and sounds for a model that no family declares: its own processor makes all."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers import PreTrainedConfig

from raylens.modeling.found_model import FoundModel, find_model, placeholder_id
from raylens.preprocess.field_layout import Outputs, whole
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.models.family import HFProcessor, Kwargs, Modality, ProcessorFamily, Size
from raylens.preprocess.prompt_updates import FrameInsertion, Position, PromptReplacement

_RATIOS = ((1, 1), (3, 4), (4, 3), (1, 2), (2, 1), (2, 5), (5, 2), (1, 4), (4, 1), (1, 8), (8, 1))
_SIDES = (1600, 3600)
"""Shapes of the pictures among which the largest item is searched, and roots of their areas in pixels."""

Samples = npt.NDArray[np.float32]
"""The samples of a sound (num_samples,), at the processor's rate."""
_LENGTHS = "audio_seqlens"
"""The name under which `get_rope_index` takes the number of frames of each sound. No processor returns it."""

_SIZES = [
    (int(side * (high / wide) ** 0.5), int(side * (wide / high) ** 0.5)) for side in _SIDES for high, wide in _RATIOS
]


def find_processor_family(
    config: PreTrainedConfig, text_of_picture: Callable[[HFProcessor], str] | None = None
) -> ProcessorFamily:
    """`text_of_picture`: returns the text for a picture in a prompt. None: it is found.

    Raises ValueError if transformers has no such model, or if it has no separate features of pictures or sounds."""
    found = find_model(config)
    modalities = {} if found.only_hears else {"image": _pictures(config, found, text_of_picture)}
    if found.sounds is not None:
        lengths = [name for name in found.position_fields if name == _LENGTHS]
        modalities["audio"] = sound_modality(partial(_token, config.audio_token_id), found.sound_fields, lengths)
    # With Pillow, transformers loads no processor that has a part for videos.
    return ProcessorFamily(
        processor_class="AutoProcessor", modalities=modalities, frame=_frame, backends=("torchvision",)
    )


def _pictures(
    config: PreTrainedConfig, found: FoundModel, text_of_picture: Callable[[HFProcessor], str] | None
) -> Modality:
    positions = found.position_fields
    target = text_of_picture or partial(_picture_text, placeholder_id(config))
    return Modality(
        fields=dict.fromkeys([*found.picture_fields, *positions], whole),
        update=lambda processor: PromptReplacement(target(processor)),
        embed_token=partial(_token, placeholder_id(config)),
        size_outputs=lambda processor, height, width, kwargs: _run(
            processor, Image.new("RGB", (width, height)), target(processor)
        ),
        largest=lambda processor, kwargs: _SIZES,
        run=lambda processor, picture, kwargs: _run(processor, picture, target(processor)),
        expansion=lambda processor, outputs, kwargs: _expansion(processor, outputs, target(processor)),
        language_fields=tuple(positions),
    )


def _frame(processor: HFProcessor) -> tuple[FrameInsertion, ...]:
    """Returns the tokens that the processor puts before every prompt, such as a BOS that its tokenizer does not add."""
    prompt = "a"
    plain = processor.tokenizer(prompt)["input_ids"]
    ids = call_processor(processor, prompt, [])["input_ids"][0].tolist()
    num_added = len(ids) - len(plain)
    if num_added == 0 or ids[num_added:] != plain:
        return ()
    return (FrameInsertion(processor.tokenizer.decode(ids[:num_added]), Position.START, unless_there=True),)


@lru_cache(maxsize=8)
def _picture_text(placeholder: int, processor: HFProcessor) -> str:
    """Returns the text for a picture in a prompt. `placeholder`: the token at positions with its embeddings.

    Raises ValueError if the processor puts a picture's tokens at the place of none of its own texts."""
    errors = []
    for text in _texts(placeholder, processor):
        try:
            outputs = _run(processor, Image.new("RGB", (64, 64)), text)
        except Exception as error:  # mostly a number of texts that is not the number of pictures
            errors.append(f"{text!r}: {error}")
            continue
        if placeholder in np.asarray(outputs["input_ids"][0]):
            return text
    reason = "; ".join(errors) or "no text becomes its placeholders"
    raise ValueError(f"the text for a picture in a prompt of {type(processor).__name__} was not found: {reason}")


def _texts(placeholder: int, processor: HFProcessor) -> Iterator[str]:
    for name in ("image_placeholder_token", "image_token", "boi_token"):
        if isinstance(text := getattr(processor, name, None), str):
            yield text
    marks = [getattr(processor, f"image_{edge}token", None) for edge in ("start_", "", "end_")]
    if all(isinstance(mark, str) for mark in marks):
        yield "".join(map(str, marks))
    yield str(processor.tokenizer.convert_ids_to_tokens(placeholder))


def call_processor(
    processor: HFProcessor, text: str, pictures: Sequence[Any], sounds: Sequence[Samples] = (), **options: Any
) -> Outputs:
    """Returns all outputs for a prompt with its pictures and sounds, as tensors. Raises the processor's errors."""
    call = partial(processor, text=[text], return_tensors="pt", **options)
    if sounds:
        call = partial(call, audio=list(sounds), sampling_rate=sampling_rate(processor))
    try:
        outputs: Outputs = call(images=[pictures]) if pictures else call()
    except (TypeError, ValueError):
        if sounds:
            raise
        # GOT-OCR takes a list of pictures for pages. It and Qwen3-ASR take no text alone.
        outputs = call(images=pictures) if pictures else processor.tokenizer([text], return_tensors="pt")
    return outputs


def _run(processor: HFProcessor, picture: Any, text: str) -> Outputs:
    """Returns all outputs for a prompt that is one picture."""
    return call_processor(processor, text, [picture], add_special_tokens=False, return_text_replacement_offsets=True)


def _expansion(processor: HFProcessor, outputs: Outputs, text: str) -> str:
    """Returns what the processor made of an item's text. Some processors do not tell it: then it is the prompt."""
    (told,) = outputs.get("text_replacement_offsets") or ([],)
    if told:
        (replaced,) = told
        return text.replace(replaced["text"], replaced["replacement"], 1)
    return str(processor.tokenizer.decode(outputs["input_ids"][0]))


def _token(token_id: int, processor: HFProcessor) -> str:
    return str(processor.tokenizer.convert_ids_to_tokens(token_id))


def sound_modality(token: Callable[[HFProcessor], str], fields: Sequence[str], lengths: Sequence[str] = ()) -> Modality:
    """Returns the processing of sounds. `token`: the placeholder, which is also the text for a sound in a prompt.
    `fields`: the outputs that Encode takes. `lengths`: names of the number of a sound's frames, for Generate."""

    def run(processor: HFProcessor, samples: Samples, kwargs: Kwargs) -> Outputs:
        options = {"add_special_tokens": False, "return_text_replacement_offsets": True}
        outputs = dict(call_processor(processor, token(processor), [], [samples], **options))
        return outputs | {name: outputs["feature_attention_mask"].sum(-1) for name in lengths}

    return Modality(
        fields=dict.fromkeys([*fields, *lengths], whole),
        update=lambda processor: PromptReplacement(token(processor)),
        embed_token=token,
        size_outputs=lambda processor, num_samples, kwargs: run(processor, _silence((num_samples,)), kwargs),
        largest=lambda processor, kwargs: [(round(kwargs["max_duration_s"] * sampling_rate(processor)),)],
        decode=_decoded,
        blank=_silence,
        run=run,
        expansion=lambda processor, outputs, kwargs: _expansion(processor, outputs, token(processor)),
        language_fields=tuple(lengths),
    )


def sampling_rate(processor: HFProcessor) -> int:
    """Returns the samples a second of sounds that the processor takes."""
    return int(processor._audio_processor.sampling_rate)


def _silence(size: Size) -> Samples:
    return np.zeros(size[0], dtype=np.float32)


def _decoded(processor: HFProcessor, content: bytes, limits: MediaLimits, kwargs: Kwargs) -> Samples:
    """Decodes a sound that the processor takes whole: some processors would cut off the end of a long one."""
    # Only models that hear need PyAV.
    from raylens.preprocess.audio import decode_audio

    rate, extractor = sampling_rate(processor), processor._audio_processor
    defaults = {name: one.default for name, one in inspect.signature(extractor.__call__).parameters.items()}
    settings = {**defaults, **kwargs}
    most = settings.get("max_length") or getattr(extractor, "n_samples", None)
    seconds = most / rate if settings.get("truncation") is True and most else limits.audio.max_duration_s
    own = replace(limits.audio, max_duration_s=min(seconds, limits.audio.max_duration_s))
    return decode_audio(content, sampling_rate=rate, limits=own)
