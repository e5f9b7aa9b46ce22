"""One prompt of a client's request, and the record of its way through the pipeline."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from raylens.deployments.pipeline.media_source import MediaSource
from raylens.deployments.request_context import NO_REQUEST, RequestContext
from raylens.deployments.wire.stage_messages import DECODE
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import (
    ChatPrompt,
    InterleavedPrompt,
    PooledPrompt,
    Prompt,
    PromptTruncation,
    StageTime,
    TextPrompt,
)

CHARS_PER_TOKEN = 4
"""Approximate characters of text in one token."""
_SHORT_PROMPT_TOKENS = 2048


@dataclass(slots=True)
class RequestTrace:
    """The pipeline's record of a request: the ids of its rendered prompt if the request asked for them, the times of
    the stages, and the number of its items in each cache."""

    prompt_token_ids: list[int] = field(default_factory=list)
    times: list[StageTime] = field(default_factory=list)
    num_processor_cache_hits: int = 0
    num_embedding_cache_hits: int = 0

    def clear(self) -> None:
        self.prompt_token_ids = []
        self.times = []
        self.num_processor_cache_hits = self.num_embedding_cache_hits = 0


def seconds_by_stage(times: Iterable[StageTime]) -> dict[str, float]:
    """Returns the seconds of each stage of the waterfall. Items and prompts run in parallel, so the slowest one
    counts."""
    seconds: dict[str, float] = {}
    for one in times:
        if one.stage != DECODE:
            seconds[one.stage] = max(one.seconds, seconds.get(one.stage, 0.0))
    return seconds


@dataclass(frozen=True, slots=True)
class PipelineRequest:
    """One prompt for the pipeline. `context`: of the client's request, which may bring several prompts.

    `media`: the prompt's items, in its order. `options`: the client's processor settings. `video_options`: additional
    settings for videos only. `cache_salt`: requests with different salts share neither items nor prefixes.
    `prompt_salt`: requests with different ones share no prefixes. `cache_key`: requests with the same key go to the
    same replica of Generate. `adapter`: the name of the answering LoRA adapter, if any. `priority`: lower values go
    first. `returns_prompt_ids`: whether `trace` gets the ids of the prompt's tokens. `pools`: the answer is the
    prompt's embeddings or scores. `on_fetched`: gets the bytes and
    the pixels of each fetched item; its error ends the request."""

    request_id: str
    prompt: Prompt
    media: list[MediaSource]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)
    video_options: dict[str, Any] = field(default_factory=dict)
    cache_salt: str = ""
    prompt_salt: str = ""
    cache_key: str | None = None
    adapter: str | None = None
    priority: int = 0
    truncation: PromptTruncation | None = None
    returns_prompt_ids: bool = False
    pools: bool = False
    on_fetched: Callable[[int, int], None] = lambda num_bytes, num_pixels: None
    context: RequestContext = NO_REQUEST
    trace: RequestTrace = field(default_factory=RequestTrace)

    def is_short(self, num_item_tokens: int = 0) -> bool:
        """Returns whether Generate may render the prompt itself, which saves a call. `num_item_tokens`: of the prompt's
        items. Rendering a long prompt would take interpreter time from decoding."""
        num_tokens = estimated_tokens(self.prompt) + num_item_tokens
        return not self.returns_prompt_ids and num_tokens <= _SHORT_PROMPT_TOKENS

    @property
    def prefix_salt(self) -> str:
        """Requests share prefixes only if this is equal. Items are shared by all adapters, which do not change the
        vision half."""
        return "\0".join((self.cache_salt, self.prompt_salt, self.adapter or ""))

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that the request may need."""
        if self.media:
            return "shared", "preprocess", "encode", "generate"
        return ("generate",) if self.is_short() else ("preprocess", "generate")

    def options_of(self, source: MediaSource) -> dict[str, Any]:
        """Returns the client's processor settings for an item."""
        return self.options | self.video_options if source.modality == "video" else self.options

    def num_alike(self, source: MediaSource) -> int:
        """Returns the number of items of the source's modality in the request, including the source."""
        return sum(other.modality == source.modality for other in self.media)


def estimated_tokens(prompt: Prompt) -> int:
    """Estimates the prompt's tokens, without those of its items."""
    if isinstance(prompt, ChatPrompt | PooledPrompt):
        num_chars = prompt.num_chars
    elif isinstance(prompt, TextPrompt):
        num_chars = len(prompt.text)
    elif isinstance(prompt, InterleavedPrompt):
        num_chars = sum(len(part or "") for part in prompt.parts)
    else:
        return len(prompt.token_ids)
    return num_chars // CHARS_PER_TOKEN
