"""The multimodal processor: chat messages and encoded pictures to token ids, placeholder ranges and tensors.

Wraps the model's Hugging Face processor and runs it item by item, so that each item can be cached, shipped and
encoded alone; the ids and tensors are those of one call of the Hugging Face processor with everything at once.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from jinja2.exceptions import TemplateError
from transformers import AutoConfig, AutoProcessor

from preprocess.media import MediaLimits, decode_image
from preprocess.models import FAMILIES
from preprocess.schema import InvalidRequestError, ItemInfo, ItemTensors, PlaceholderRange, ProcessedPrompt

Message = dict[str, Any]
"""A chat message as chat templates take it: `role` and `content`, a list of {"type": "text"|"image", ...}."""


@dataclass(frozen=True, slots=True)
class ProcessorConfig:
    """`model` is a folder or a hub id; `dtype` that of the encoder; `max_model_len` in tokens, None: the model's."""

    model: str
    revision: str | None = None
    dtype: torch.dtype = torch.float32
    max_model_len: int | None = None
    limits: MediaLimits = field(default_factory=MediaLimits)


class MultiModalProcessor:
    """Turns messages into prompts and encoded pictures into tensors. Not thread-safe: one caller at a time
    for each of `process_image` and `render`, which do not share state that either changes."""

    def __init__(self, config: ProcessorConfig) -> None:
        hf_config = AutoConfig.from_pretrained(config.model, revision=config.revision)
        if hf_config.model_type not in FAMILIES:
            raise ValueError(
                f"model_type {hf_config.model_type!r} of {config.model} is not supported, only {sorted(FAMILIES)}"
            )
        self._config = config
        self._family = FAMILIES[hf_config.model_type]
        self._processor = AutoProcessor.from_pretrained(config.model, revision=config.revision)
        self._tokenizer = self._processor.tokenizer
        self._template = self._processor.chat_template or self._tokenizer.chat_template
        if not isinstance(self._template, str):
            raise ValueError(f"{config.model} has no chat template")
        self._image_kwargs = self._processor._merge_kwargs(
            tokenizer_init_kwargs=self._tokenizer.init_kwargs, return_tensors="pt"
        )["images_kwargs"]
        self._special_prefix = _special_prefix(self._tokenizer)
        self._longest_token = max(len(token) for token in self._tokenizer.get_vocab())
        self.max_model_len: int = config.max_model_len or hf_config.get_text_config().max_position_embeddings
        self.fingerprint = self._fingerprint()

    def process_image(self, content: bytes) -> tuple[ItemInfo, ItemTensors]:
        """Decodes and processes one encoded picture.

        Returns its metadata and its tensors, for llava `pixel_values` (channels, height, width) in the encoder's
        dtype. Raises InvalidRequestError when the picture cannot be decoded or breaks a limit.
        """
        started = time.perf_counter()
        image = decode_image(content, limits=self._config.limits)
        decoded = time.perf_counter()
        outputs, (replacement,) = self._processor._process_images([image], **self._image_kwargs)
        tensors = {name: self._item_tensor(outputs[name][0]) for name in self._family.item_fields}
        info = ItemInfo(
            modality="image",
            num_tokens=replacement.count(self._processor.image_token),
            replacement=replacement,
            num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            decode_seconds=decoded - started,
            process_seconds=time.perf_counter() - decoded,
        )
        return info, tensors

    def render(self, messages: Sequence[Message], items: Sequence[ItemInfo], hashes: Sequence[str]) -> ProcessedPrompt:
        """Renders the chat template, expands the placeholders for `items` (in prompt order) and tokenises.

        Control tokens and placeholders that a user typed are tokenised as plain text. Raises InvalidRequestError
        when the template refuses the messages or the prompt leaves no room to answer in the context.
        """
        self._check_text_length(messages)
        prompt = self._render_template(messages)
        try:
            (text,), _ = self._processor.get_text_with_replacements(
                [prompt], images_replacements=[item.replacement for item in items]
            )
        except StopIteration:
            raise _wrong_item_count(len(items)) from None
        token_ids = self._tokenize(text)
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens, the context of {self.max_model_len} tokens"
                " leaves no room for an answer",
                field="messages",
                code="context_length_exceeded",
            )
        return ProcessedPrompt(token_ids, self._find_placeholders(token_ids, items), list(hashes))

    def _check_text_length(self, messages: Sequence[Message]) -> None:
        """Refuses what cannot fit however it is tokenised, before time is spent on it."""
        num_chars = sum(len(part.get("text", "")) for message in messages for part in message["content"])
        if num_chars > self.max_model_len * self._longest_token:
            raise InvalidRequestError(
                f"{num_chars} characters of text are more than the context of {self.max_model_len} tokens can hold",
                field="messages",
                code="context_length_exceeded",
            )

    def _item_tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            value = value.to(self._config.dtype)
        # Contiguous and owning its memory: what is shipped is the item and not the batch it was cut from.
        return value.contiguous()

    def _render_template(self, messages: Sequence[Message]) -> str:
        (marked,), _, _, _ = self._tokenizer._mark_chat_inputs(
            self._template, [list(messages)], None, None, {}, True, False
        )
        try:
            prompt: str = self._processor.apply_chat_template(
                marked, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            raise InvalidRequestError(
                "the model's chat template does not accept these roles or contents",
                field="messages",
            ) from error
        return prompt

    def _tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True)[
            "input_ids"
        ]
        bos = self._tokenizer.bos_token
        if bos and text.startswith(bos):
            return token_ids
        return self._special_prefix + token_ids

    def _find_placeholders(self, token_ids: list[int], items: Sequence[ItemInfo]) -> list[PlaceholderRange]:
        """Splits the prompt's placeholder positions among the items, in order and by their lengths."""
        image_token_id = self._processor.image_token_id
        positions = [i for i, token_id in enumerate(token_ids) if token_id == image_token_id]
        if len(positions) != sum(item.num_tokens for item in items):
            raise _wrong_item_count(len(items))
        ranges, start = [], 0
        for item in items:
            placeholder = PlaceholderRange(positions[start], item.num_tokens)
            assert positions[start + item.num_tokens - 1] == placeholder.offset + placeholder.length - 1
            ranges.append(placeholder)
            start += item.num_tokens
        return ranges

    def _fingerprint(self) -> str:
        """Identifies everything besides the media that changes processor outputs: settings, back end, versions."""
        settings = {
            "processor": type(self._processor).__name__,
            "image_processor": type(self._processor.image_processor).__name__,
            "settings": self._processor.image_processor.to_dict(),
            "kwargs": self._image_kwargs,
            "model": self._config.model,
            "revision": self._config.revision,
            "dtype": str(self._config.dtype),
            "transformers": transformers.__version__,
        }
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _special_prefix(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer puts before every text by itself (BOS, for tokenizers that add one)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a", add_special_tokens=True)["input_ids"]
    prefix: list[int] = special[: len(special) - len(plain)]
    return prefix if special[len(prefix) :] == plain else []


def _wrong_item_count(num_items: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the prompt's placeholders do not match the {num_items} media items",
        field="messages",
        code="placeholder_mismatch",
    )
