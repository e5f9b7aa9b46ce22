"""Turns a media item into tensors: decodes it, and runs the part of the Hugging Face processor for it."""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers

from raylens.preprocess import schema
from raylens.preprocess.field_layout import Outputs, item_tensors, whole
from raylens.preprocess.media import DEFAULT_VIDEO_FRAMES, MediaLimits
from raylens.preprocess.models.family import DEFAULT_FRAMES, HFProcessor, Kwargs, Modality, ProcessorFamily, Size
from raylens.preprocess.precomputed import EMBEDDINGS, check_embeddings, check_finite, checked_inputs, read_precomputed
from raylens.preprocess.prompt_tokenizer import PromptTokenizer

Options: TypeAlias = Mapping[str, object]
_PARTS = ("image_processor", "video_processor", "_audio_processor")
"""Attributes of a processor with its parts for media."""
NO_OPTIONS: Options = MappingProxyType({})


class ItemProcessor:
    """Processes the items of one model. Not thread-safe."""

    def __init__(
        self,
        processor: HFProcessor,
        family: ProcessorFamily,
        tokenizer: PromptTokenizer,
        *,
        dtype: torch.dtype,
        embedding_dtype: torch.dtype,
        limits: MediaLimits,
        video_frames: int = DEFAULT_VIDEO_FRAMES,
    ) -> None:
        self._processor = processor
        self._family = family
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._embedding_dtype = embedding_dtype
        self._limits = limits
        merged = processor._merge_kwargs(
            tokenizer_init_kwargs=processor.tokenizer.init_kwargs, return_tensors="pt", return_metadata=True
        )
        names = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
        self._kwargs = {modality: merged[name] for modality, name in names.items()}
        self._kwargs["image"].pop("return_metadata", None)
        self._kwargs["video"][DEFAULT_FRAMES] = video_frames

    def process(
        self, modality: str, content: bytes, *, num_in_prompt: int = 1, options: Options = NO_OPTIONS
    ) -> tuple[schema.ItemInfo, schema.ItemTensors]:
        """Decodes and processes an encoded item.

        `num_in_prompt`: the number of items of the modality in the item's prompt, cached ones included. `options`: the
        client's settings. Returns the item's metadata and its tensors, floating-point ones in the encoder's dtype.
        Raises InvalidRequestError if the item cannot be decoded or breaks a limit, or an option is wrong."""
        rules, kwargs = self._chosen(modality, options, num_in_prompt)
        watch = schema.Stopwatch()
        decoded = rules.decode(self._processor, content, self._limits, kwargs)
        decode = watch.read("media_decode")
        watch = schema.Stopwatch()
        expansion, tensors = self._processed(modality, rules, decoded, kwargs)
        return _info(modality, rules, expansion, tensors, times=(decode, watch.read("processor"))), tensors

    def _processed(
        self, modality: str, rules: Modality, decoded: Any, kwargs: Kwargs
    ) -> tuple[schema.ItemExpansion, schema.ItemTensors]:
        outputs = self._run(modality, rules, decoded, kwargs)
        tensors = rules.pack(self._processor, item_tensors(rules.fields, outputs))
        return self._expansion(modality, rules, outputs, kwargs), self._stored(rules, tensors)

    def accept(
        self, modality: str, content: bytes, *, num_in_prompt: int = 1, options: Options = NO_OPTIONS
    ) -> tuple[schema.ItemInfo, schema.ItemTensors]:
        """Checks an item processed by the client, see `preprocess/precomputed.py`. Returns the same as `process`.

        Raises InvalidRequestError if its tensors do not fit this model or the picture's size, or hold numbers that are
        not finite."""
        rules, kwargs = self._chosen(modality, options, num_in_prompt)
        if modality != "image":
            raise schema.InvalidRequestError(f"only images may be sent as tensors, not a {modality}", field="media")
        item = read_precomputed(content, rules.fields, limits=self._limits)
        if item.is_encoded:
            outputs = rules.size_outputs(self._processor, *item.size, kwargs)
            expansion = self._expansion(modality, rules, outputs, kwargs)
            check_embeddings(item, expansion.features.num_embeds)
            layout = {name: rules.fields[name] for name in rules.language_fields}
            tensors = item.tensors | item_tensors(layout, outputs)
        else:
            # A blank picture of that size yields the expected shapes, grids and indices.
            outputs = self._run(modality, rules, rules.blank(item.size), kwargs)
            expansion = self._expansion(modality, rules, outputs, kwargs)
            expected = rules.pack(self._processor, item_tensors(rules.fields, outputs))
            tensors = checked_inputs(item, expected, rules, self._processor)
        tensors = self._stored(rules, tensors)
        check_finite(tensors)
        return _info(modality, rules, expansion, tensors, is_encoded=item.is_encoded), tensors

    def _run(self, modality: str, rules: Modality, decoded: Any, kwargs: Kwargs) -> Outputs:
        try:
            return rules.run(self._processor, decoded, kwargs)
        except schema.InvalidRequestError:
            raise
        except ValueError as error:
            # Hugging Face's processors raise ValueError for sizes and lengths that they cannot resize.
            reason = f"the model's processor cannot take {modality} items of this size or length"
            raise schema.invalid_media(reason, "unsupported_size") from error

    def blank_item(
        self, modality: str, size: Size, options: Options = NO_OPTIONS
    ) -> tuple[schema.ItemInfo, schema.ItemTensors]:
        """Returns a black item of `size` in the form of `process`, to measure or reserve memory."""
        rules, kwargs = self._chosen(modality, options)
        expansion, tensors = self._processed(modality, rules, rules.blank(size), kwargs)
        return _info(modality, rules, expansion, tensors), tensors

    def largest_item(self, modality: str) -> tuple[schema.ItemInfo, schema.ItemTensors]:
        """Returns a blank item of the size with the most embeddings."""
        return self.blank_item(modality, self.largest_size(modality), self.rules(modality).largest_options)

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities that the model accepts."""
        return tuple(name for name in self._family.modalities if self._takes(name))

    def _takes(self, modality: str) -> bool:
        """Returns whether the processor accepts the modality. Without torchvision it has no video processor."""
        has_part = modality != "video" or getattr(self._processor, "video_processor", None) is not None
        return modality in self._family.modalities and has_part

    def rules(self, modality: str, num_in_prompt: int = 1) -> Modality:
        """Returns the rules for items of `modality`. Raises InvalidRequestError if the model does not accept them."""
        rules = self._family.modalities.get(modality)
        if rules is None or not self._takes(modality):
            reason = f"this model takes {', '.join(self.modalities)}, not {modality}"
            raise schema.invalid_media(reason, "unsupported_modality")
        return rules.among_others if num_in_prompt > 1 and rules.among_others is not None else rules

    def expansion_for_size(
        self, modality: str, size: Size, *, num_in_prompt: int = 1, options: Options = NO_OPTIONS
    ) -> schema.ItemExpansion:
        """Returns the expansion of an item of `size` in a prompt, computed without pixels.

        A video's `size` counts sampled frames. Their timestamps are invented: the number of embeddings is exact, but a
        prompt with timestamps has another text for a real video."""
        rules, kwargs = self._chosen(modality, options, num_in_prompt)
        return self._expansion(modality, rules, rules.size_outputs(self._processor, *size, kwargs), kwargs)

    def largest_size(self, modality: str) -> Size:
        """Returns the size with the most embeddings, with the options for the most embeddings."""
        options = self.rules(modality).largest_options
        rules, kwargs = self._chosen(modality, options)
        if modality == "video":
            kwargs["max_frames"] = self._limits.video.max_frames
        elif modality == "audio":
            kwargs["max_duration_s"] = self._limits.audio.max_duration_s

        def num_embeds(size: Size) -> int:
            return self.expansion_for_size(modality, size, options=options).features.num_embeds

        return max(rules.largest(self._processor, kwargs), key=num_embeds)

    def identity(self, checkpoint: str) -> schema.ProcessorIdentity:
        """Returns the identity of the processor. `checkpoint`: its checkpoint's name and revision.

        The fingerprint covers all influences on an item besides its media: settings, back end, tokens, versions."""
        processors = {name: getattr(self._processor, name, None) for name in _PARTS}
        settings = {
            "checkpoint": checkpoint,
            "processor": [type(self._processor).__name__, getattr(self._processor, "identity", "")],
            "processors": {
                name: [type(one).__name__, one.to_dict()] for name, one in processors.items() if one is not None
            },
            "kwargs": self._kwargs,
            "expansions": [self._probe(modality) for modality in self._family.modalities],
            "dtypes": [str(self._dtype), str(self._embedding_dtype)],
            "transformers": transformers.__version__,
        }
        text = json.dumps(settings, sort_keys=True, default=str)
        assert " at 0x" not in text, "an address in memory would be another in every replica"
        among_others = [name for name, rules in self._family.modalities.items() if rules.among_others is not None]
        return schema.ProcessorIdentity(hashlib.sha256(text.encode()).hexdigest(), frozenset(among_others))

    def _probe(self, modality: str) -> list[int]:
        """Returns the token ids of a small item, as a sample of the tokenizer."""
        if modality not in self._kwargs or not self._takes(modality):
            return []
        size = {"video": (8, 64, 64), "audio": (16_000,)}.get(modality, (64, 64))
        return [int(one) for one in self.expansion_for_size(modality, size).token_ids]

    def _stored(self, rules: Modality, tensors: schema.ItemTensors) -> schema.ItemTensors:
        """Returns the tensors in their stored dtypes, contiguous and owning their memory, so that sending an item does
        not send its whole batch."""
        # Language fields keep their exact dtype, because the language model computes positions from them.
        dtypes = dict.fromkeys(tensors.keys() - set(rules.language_fields), self._dtype)
        dtypes |= dict.fromkeys(tensors.keys() & {EMBEDDINGS}, self._embedding_dtype)
        return {name: _stored_tensor(value, dtypes.get(name, value.dtype)) for name, value in tensors.items()}

    def _chosen(self, modality: str, options: Options, num_in_prompt: int = 1) -> tuple[Modality, dict[str, Any]]:
        """Returns the rules for the item, and the keyword arguments of its processor."""
        rules = self.rules(modality, num_in_prompt)
        chosen: dict[str, Any] = {}
        for name, value in options.items():
            if name not in rules.options:
                known = ", ".join(sorted(rules.options)) or "none"
                reason = f"is no option of this model for an item of kind {modality}, known: {known}"
                raise schema.invalid_option(name, reason)
            chosen |= rules.options[name](self._processor, value)
        return rules, dict(self._kwargs.get(modality, {})) | chosen

    def _expansion(self, modality: str, rules: Modality, outputs: Outputs, kwargs: Kwargs) -> schema.ItemExpansion:
        text = rules.expansion(self._processor, outputs, kwargs)
        before, ids, after = self._tokenizer.content(text)
        is_embed = ids == self._tokenizer.token_id(rules.embed_token(self._processor))
        feature_ids = [self._tokenizer.token_id(token) for token in rules.feature_tokens(self._processor)]
        features = np.flatnonzero(is_embed | np.isin(ids, feature_ids))
        if not len(features):
            raise schema.InvalidRequestError(f"the {modality} item has no positions in the prompt", field="media")
        start, end = int(features[0]), int(features[-1]) + 1
        mask = None if is_embed[start:end].all() else tuple(is_embed[start:end].tolist())
        return schema.ItemExpansion(ids, schema.PlaceholderRange(start, end - start, mask), before, after)


def _info(
    modality: str,
    rules: Modality,
    expansion: schema.ItemExpansion,
    tensors: schema.ItemTensors,
    *,
    is_encoded: bool = False,
    times: tuple[schema.StageTime, ...] = (),
) -> schema.ItemInfo:
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    language_inputs = {
        name: (tensors[name] if rules.fields[name] is whole else tensors[name].unsqueeze(0)).numpy()
        for name in rules.language_fields
        if name in tensors
    }
    return schema.ItemInfo(modality, expansion, num_bytes, is_encoded, language_inputs, times)


def _stored_tensor(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if value.is_floating_point():
        value = value.to(dtype)
    is_whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    return value if is_whole else value.clone(memory_format=torch.contiguous_format)
