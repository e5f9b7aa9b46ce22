"""The types that `preprocess` hands to the other stages, and its errors.

`encoder` and `llm` may import this module of the package and no other."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    # Not at run time: a process that only passes references on needs the types of this module and never torch.
    import torch

ItemT = TypeVar("ItemT")

ItemTensors: TypeAlias = "dict[str, torch.Tensor]"
"""Processor outputs of one item by name, e.g. `pixel_values` of shape (channels, height, width)."""


class InvalidRequestError(ValueError):
    """Input that the client has to change: `field` says which, `reason` why. `reason` never holds internals.

    `item` is the index of the prompt's item that the error is about. A caller may know the client's name of that item.
    """

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
        """Returns the same error for another field: a library knows its argument, its caller the client's name for
        it."""
        return InvalidRequestError(self.reason, field=field, code=self.code, status=self.status)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword-only arguments do not survive pickling by themselves, and errors pass between
        # processes.
        return _rebuild_error, (self.reason, self.field, self.code, self.status, self.item)


def _rebuild_error(reason: str, field: str, code: str, status: int, item: int | None) -> InvalidRequestError:
    return InvalidRequestError(reason, field=field, code=code, status=status, item=item)


class ChatTemplateError(RuntimeError):
    """The model's own chat template fails, which no client can mend. The message holds no internals."""


Message: TypeAlias = dict[str, Any]
"""A chat message: `role` and `content`, a text or a list of parts, {"type": "text", "text": ...} or {"type": "image"}
or another kind of media. An assistant's message that holds tool calls alone has no content."""


def parts_of(message: Message) -> list[dict[str, str]]:
    """Returns the parts of a message. A text is one part."""
    content = message.get("content", [])
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, for the model's chat template. Media parts stand where the items belong.

    `tools`: functions that the model may call, in OpenAI's form. `template_kwargs`: variables of the chat template.
    With `add_generation_prompt` the prompt ends with the beginning of an answer. With `continue_final_message` it ends
    in the middle of the last message. The two exclude each other.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def num_chars(self) -> int:
        """The number of characters of all its texts, including the texts of tools, tool calls and variables. Each
        message counts as one character more, because templates write something for each."""
        count = len(self.messages)
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
    """A text as the model's Hugging Face processor takes it, with its placeholders in it."""

    text: str


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids. Placeholders may be as the tokenizer leaves them, or be expanded already."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class InterleavedPrompt:
    """Texts and pictures in turn: None stands for the next picture, which gets the model's own placeholder."""

    parts: list[str | None]


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokensPrompt | InterleavedPrompt


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Half-open range [offset, offset + length) of prompt positions that belong to one item's features.

    `is_embed[i]` tells whether position offset + i takes one of the item's embeddings; the others (row ends, tile
    marks) keep the embedding of their token. None: every position does.
    """

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None

    @property
    def num_embeds(self) -> int:
        """The number of positions that take an embedding, which is the number of rows of the item's embeddings."""
        return self.length if self.is_embed is None else sum(self.is_embed)

    def embed_positions(self) -> Sequence[int]:
        """Returns the prompt positions that take the item's embeddings, ascending."""
        positions = range(self.offset, self.offset + self.length)
        return positions if self.is_embed is None else tuple(compress(positions, self.is_embed))


@dataclass(frozen=True, slots=True)
class ItemExpansion:
    """An item's text in the prompt, tokenised once: `before` + `token_ids` + `after`.

    `before` and `after` are ordinary text at its edges, mostly empty. This text may merge with the prompt's text beside
    it when that is tokenised. `features` is relative to `token_ids`, an int32 array of shape (num_tokens,).
    """

    token_ids: npt.NDArray[np.int32]
    features: PlaceholderRange
    before: str = ""
    after: str = ""


LanguageInputs: TypeAlias = dict[str, npt.NDArray[np.generic]]
"""The data that the language model needs of an item beside its embeddings, by name: for example `image_grid_thw`,
int64 of shape (1, 3). The values are arrays, not tensors, because they pass through processes without torch."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """When a stage of the waterfall worked on a request: `started_at`, wall time in seconds since 1970, and how many
    `seconds` from there. `place`: the process that did."""

    stage: str
    started_at: float
    seconds: float
    place: str = ""


class Stopwatch:
    """Measures from the moment when it is made."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self.started = time.perf_counter()
        """The same moment in seconds of `time.perf_counter`."""

    def read(self, stage: str, place: str = "") -> StageTime:
        """Returns the time of a stage that began then and ends now."""
        return StageTime(stage, self.started_at, time.perf_counter() - self.started, place)


@dataclass(frozen=True, slots=True)
class ItemInfo:
    """The metadata of one processed item, small enough to travel by value.

    `num_bytes` is the size of its tensors. `is_encoded` says that its tensors are embeddings already, so that the
    vision encoder has nothing to do. `language_inputs`: see LanguageInputs. `times`: of the stages that made it.
    """

    modality: str
    expansion: ItemExpansion
    num_bytes: int
    is_encoded: bool = False
    language_inputs: LanguageInputs = field(default_factory=dict, compare=False)
    times: tuple[StageTime, ...] = field(default=(), compare=False)

    @property
    def num_embeds(self) -> int:
        """The number of prompt positions that take its embeddings."""
        return self.expansion.features.num_embeds


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model writes a tool call: `start`, then a JSON object with `name` and `arguments`, then `end`."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class ProcessorIdentity:
    """Everything that decides how items come out, besides the items themselves. It is a part of their cache keys.

    `fingerprint` covers the model's processor, its settings, back end and versions. `count_dependent` names the
    modalities whose items come out differently when the prompt holds several.
    """

    fingerprint: str
    count_dependent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PromptTruncation:
    """How a prompt that is too long is cut from the left, without cutting through an item. It keeps at most what the
    context leaves beside an answer of `num_answer_tokens`, and at most `max_prompt_tokens`, unless that is None."""

    max_prompt_tokens: int | None = None
    num_answer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt ready for the engine: `placeholders[i]` is filled by the item whose hash is `mm_hashes[i]`.

    `language_inputs[i]` belongs to the same item. The items are in the order of the prompt. `item_order` has each one's
    index among the request's items; None: the prompt has all of these, in the request's order. `is_continued`: the
    answer goes on in the text with which the prompt ends. `render_seconds`: how long it took to make the prompt;
    `rendered_at`: when it was made, wall time in seconds.
    """

    prompt_token_ids: list[int]
    placeholders: list[PlaceholderRange]
    mm_hashes: list[str]
    language_inputs: list[LanguageInputs] = field(default_factory=list, compare=False)
    item_order: list[int] | None = None
    is_continued: bool = False
    render_seconds: float = field(default=0.0, compare=False)
    rendered_at: float = field(default=0.0, compare=False)

    def render_time(self, place: str) -> StageTime:
        """Returns the time of the stage `render`. `place`: the process that has done it."""
        return StageTime("render", self.rendered_at - self.render_seconds, self.render_seconds, place)

    def placed(self, items: list[ItemT]) -> list[ItemT]:
        """Returns those of the request's `items`, in the request's order, that are in the prompt, in its order."""
        return items if self.item_order is None else [items[index] for index in self.item_order]
