"""The types that `preprocess` passes to the other stages, and its errors.

`encoder` and `llm` may import only this module of the package."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    # Not at run time: processes that only pass references use these types without torch.
    import torch

ItemT = TypeVar("ItemT")

ItemTensors: TypeAlias = "dict[str, torch.Tensor]"
"""Processor outputs of one item by name, e.g. `pixel_values` of shape (channels, height, width)."""


class InvalidRequestError(ValueError):
    """Input that the client has to change. `field`: its name. `reason`: the explanation, without internals. `item`: the
    index of the prompt's item, if the error concerns one; a caller may know the client's name of that item."""

    def __init__(
        self, reason: str, *, field: str, code: str = "invalid_value", status: int = 400, item: int | None = None
    ) -> None:
        super().__init__(f"{field}: {reason}")
        self.reason = reason
        self.field = field
        self.code = code
        self.status = status
        self.item = item

    def for_field(self, field: str) -> "InvalidRequestError":
        """Returns the same error for another field, because only the caller of a library knows the client's field
        name."""
        return InvalidRequestError(self.reason, field=field, code=self.code, status=self.status)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors pass between processes, and exceptions with keyword-only arguments are not picklable by default.
        fields: dict[str, Any] = {"field": self.field, "code": self.code, "status": self.status, "item": self.item}
        return partial(InvalidRequestError, self.reason, **fields), ()


def invalid_media(reason: str, code: str) -> InvalidRequestError:
    """Returns the error for a media item that the client has to change."""
    return InvalidRequestError(reason, field="media", code=code)


def invalid_option(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(reason, field=f"mm_processor_kwargs.{name}", code="invalid_option")


class ChatTemplateError(RuntimeError):
    """The model's own chat template fails, which a client cannot fix. The message holds no internals."""


Message: TypeAlias = dict[str, Any]
"""A chat message: `role` and `content`, a text or a list of parts, {"type": "text", "text": ...} or {"type": "image"}
or another modality. An assistant's message with tool calls only has no content."""


def parts_of(message: Message) -> list[dict[str, str]]:
    """Returns the parts of a message. A text is one part."""
    content = message.get("content", [])
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, for the model's chat template. Media parts mark the places of items.

    `tools`: functions that the model may call, in OpenAI's form. `template_kwargs`: variables of the chat template.
    `add_generation_prompt`: the prompt ends with the start of an answer. `continue_final_message`: the prompt ends
    within the last message. The two exclude each other. `template`: the client's own, in place of the model's."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None

    @property
    def num_chars(self) -> int:
        """The number of characters of all its texts, including tools, tool calls and variables. Each message counts as
        one more character, because templates add text to each."""
        count = len(self.messages) + len(self.template or "")
        values: list[Any] = [*self.messages, *self.tools, self.template_kwargs]
        while values:
            value = values.pop()
            if isinstance(value, str):
                count += len(value)
            elif isinstance(value, dict):
                values += value.keys()
                values += value.values()
            elif isinstance(value, list):
                values += value
        return count


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text with placeholders, in the form of the model's Hugging Face processor."""

    text: str


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids. Placeholders may be expanded already or not."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class InterleavedPrompt:
    """Texts and pictures in prompt order. None: the next picture, with the model's own placeholder."""

    parts: list[str | None]


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """An input to be embedded, classified or, with a `query`, scored for it. The model's own form goes around it.

    `content` and `query`: parts, as of a Message; items of the query come first. `purpose`: `query` or `document`, for
    a model that tells them apart. `instruction`: replaces the model's own."""

    content: list[dict[str, str]]
    query: list[dict[str, str]] | None = None
    purpose: str | None = None
    instruction: str | None = None

    @property
    def num_chars(self) -> int:
        parts = [*self.content, *(self.query or ())]
        return len(self.instruction or "") + sum(len(part.get("text", "")) for part in parts)


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokensPrompt | InterleavedPrompt | PooledPrompt


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """The half-open range [offset, offset + length) of prompt positions of one item's features.

    `is_embed[i]`: whether position offset + i takes one of the item's embeddings; other positions (row ends, tile
    marks) keep the embedding of their token. None: all positions do."""

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None

    @property
    def num_embeds(self) -> int:
        """The number of positions with an embedding, equal to the rows of the item's embeddings."""
        return self.length if self.is_embed is None else sum(self.is_embed)

    def embed_positions(self) -> Sequence[int]:
        """Returns the prompt positions of the item's embeddings, ascending."""
        positions = range(self.offset, self.offset + self.length)
        return positions if self.is_embed is None else tuple(compress(positions, self.is_embed))


@dataclass(frozen=True, slots=True)
class ItemExpansion:
    """An item's text in the prompt, tokenised once: `before` + `token_ids` + `after`.

    `before` and `after`: ordinary text at its edges, mostly empty. It may merge with adjacent text of the prompt in
    tokenisation. `token_ids`: int32, (num_tokens,). `features`: relative to `token_ids`."""

    token_ids: npt.NDArray[np.int32]
    features: PlaceholderRange
    before: str = ""
    after: str = ""


LanguageInputs: TypeAlias = dict[str, npt.NDArray[np.generic]]
"""An item's inputs of the language model beside its embeddings, by name: for example `image_grid_thw`, int64 of shape
(1, 3). The values are arrays, not tensors, because they pass through processes without torch."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """The work of one stage of the waterfall on a request. `started_at`: wall time in seconds since 1970. `seconds`:
    its duration. `place`: the process."""

    stage: str
    started_at: float
    seconds: float
    place: str = ""


class Stopwatch:
    """Measures time since its creation."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.started = time.perf_counter()
        """The same time, in seconds of `time.perf_counter`."""

    def read(self, stage: str, place: str = "") -> StageTime:
        """Returns the time of a stage that began then and ends now."""
        return StageTime(stage, self.started_at, time.perf_counter() - self.started, place)


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """The metadata of one processed item, small enough to be passed by value.

    `num_bytes`: the size of its tensors. `is_encoded`: its tensors are embeddings, which the vision encoder skips.
    `language_inputs`: see LanguageInputs. `times`: of the stages that processed it."""

    modality: str
    expansion: ItemExpansion
    num_bytes: int
    is_encoded: bool = False
    language_inputs: LanguageInputs = field(default_factory=dict, compare=False)
    times: tuple[StageTime, ...] = field(default=(), compare=False)

    @property
    def num_embeds(self) -> int:
        """The number of prompt positions of its embeddings."""
        return self.expansion.features.num_embeds


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """A model's tags around the thoughts before its answer."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class ProcessorIdentity:
    """All influences on the result of items, besides the items themselves. Part of their cache keys.

    `fingerprint`: of the model's processor, its settings, back end and versions. `count_dependent`: the modalities
    whose items have another result if the prompt holds several."""

    fingerprint: str
    count_dependent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PromptTruncation:
    """Cuts a too long prompt from the left, without cutting through an item. The prompt keeps at most the context's
    tokens beside an answer of `num_answer_tokens`, and at most `max_prompt_tokens`, unless None."""

    max_prompt_tokens: int | None = None
    num_answer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt for the engine. The item with the hash `mm_hashes[i]` fills `placeholders[i]`.

    `language_inputs[i]`: of the same item. Items are in prompt order. `item_order`: each item's index among the
    request's items; None: the prompt has all of them, in the request's order. `is_continued`: the answer continues the
    prompt's last text. `thoughts`: the tags around thoughts before the answer; None: it has none. `is_thinking`: the
    prompt ends with their start tag. `render_seconds`: the duration of rendering; `rendered_at`: its end, wall time in
    seconds."""

    prompt_token_ids: list[int]
    placeholders: list[PlaceholderRange]
    mm_hashes: list[str]
    language_inputs: list[LanguageInputs] = field(default_factory=list, compare=False)
    item_order: list[int] | None = None
    is_continued: bool = False
    thoughts: ThoughtFormat | None = None
    is_thinking: bool = False
    render_seconds: float = field(default=0.0, compare=False)
    rendered_at: float = field(default=0.0, compare=False)

    def render_time(self, place: str) -> StageTime:
        """Returns the time of the stage `render`. `place`: its process."""
        return StageTime("render", self.rendered_at - self.render_seconds, self.render_seconds, place)

    def placed(self, items: list[ItemT]) -> list[ItemT]:
        """Returns the prompt's items, in prompt order. `items`: of the request, in the request's order."""
        return items if self.item_order is None else [items[index] for index in self.item_order]
