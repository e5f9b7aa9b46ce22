"""Estimates the cost of a request before anything is decoded: pixels from headers, tokens from characters."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import add, attrgetter, sub
from typing import Self

from raylens.deployments.pipeline.media_source import MediaSource
from raylens.deployments.pipeline.pipeline_request import CHARS_PER_TOKEN, PipelineRequest, estimated_tokens
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.pixel_count import header_pixels, is_cut_off, work_pixels

_UNKNOWN_MAX_TOKENS = 1024
"""Assumed length of an answer without a limit."""

_LOGPROBS_PER_TOKEN = 4
"""This many log-probabilities cost as much as a token: to send, and to buffer for the client."""
_SHORT_HEAD_BYTES, _HEAD_BYTES = 48 * 2**10, 3 * 2**20
"""Inspected bytes of an item, the second for a longer header. They block others for microseconds or milliseconds."""


@dataclass(frozen=True, slots=True)
class RequestCost:
    """The resources that requests take from a budget. See `config.Budget` for the units."""

    requests: int = 0
    bytes: int = 0
    pixels: int = 0
    tokens: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(add, _amounts(self), _amounts(other)))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(sub, _amounts(self), _amounts(other)))

    def __floordiv__(self, number: int) -> Self:
        return type(self)(*(one // number for one in _amounts(self)))

    def exceeded_resource(self, limit: Self) -> str | None:
        """Returns the name of the first resource above `limit`, or None."""
        return next((name for name in RESOURCES if getattr(self, name) > getattr(limit, name)), None)


RESOURCES = tuple(one.name for one in fields(RequestCost))
_amounts = attrgetter(*RESOURCES)  # dataclasses.astuple is almost 30 times slower


def cost_of(requests: Sequence[PipelineRequest], max_model_len: int, *, at_once: int = 1) -> RequestCost:
    """Returns the cost of a client's request, without the media behind its URLs. An answer counts at most
    `max_model_len` tokens, because the engine refuses a longer one with a message. `at_once`: the most prompts in work
    together."""
    # A query's picture is in the prompt of each document, and is made once.
    pixels = sum({source.url: source.num_pixels for request in requests for source in request.media}.values())
    tokens = sum(_num_tokens(request, max_model_len) for request in requests)
    return RequestCost(requests=min(len(requests), at_once), pixels=pixels, tokens=tokens)


def cost_of_text(num_chars: int) -> RequestCost:
    return RequestCost(requests=1, tokens=num_chars // CHARS_PER_TOKEN)


def data_url_pixels(source: MediaSource, limits: MediaLimits) -> int:
    """Returns the pixels of an item in the body, and 0 for one outside of it or a malformed one."""
    data = source.data
    if data is None or source.is_precomputed:
        return 0
    if source.modality != "image":
        head = data.head(_HEAD_BYTES)
        return work_pixels(source.modality, head, limits) * -(-data.num_bytes // _HEAD_BYTES)
    head = data.head(_SHORT_HEAD_BYTES)
    if is_cut_off(head) and data.num_bytes > _SHORT_HEAD_BYTES:
        head = data.head(_HEAD_BYTES)
    pixels = header_pixels(head)
    if head and pixels is None and data.num_bytes > _HEAD_BYTES:
        return limits.max_image_pixels  # padding may hide the size
    return min(pixels or data.num_bytes, limits.max_image_pixels) if head else 0


def _num_tokens(request: PipelineRequest, max_model_len: int) -> int:
    params = request.params
    most = _UNKNOWN_MAX_TOKENS if params.max_tokens is None else params.max_tokens
    num_answer_tokens = params.n * min(most, max_model_len)
    of_prompt = _with_logprobs(estimated_tokens(request.prompt), params.prompt_logprobs)
    num_logprobs = max(params.logprobs or 0, len(params.logprob_token_ids))
    return of_prompt + _with_logprobs(num_answer_tokens, num_logprobs)


def _with_logprobs(num_tokens: int, num_logprobs: int | None) -> int:
    return num_tokens + num_tokens * (num_logprobs or 0) // _LOGPROBS_PER_TOKEN
