"""The cost of a request, estimated before anything of it is decoded: pixels by headers, tokens by characters."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import add, attrgetter, sub
from typing import Self

from raylens.deployments.pipeline.media_source import MediaSource
from raylens.deployments.pipeline.pipeline_request import CHARS_PER_TOKEN, PipelineRequest, estimated_tokens
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.pixel_count import header_pixels, is_cut_off, work_pixels

_UNKNOWN_MAX_TOKENS = 1024
"""The tokens that count for an answer which may be as long as the context has room for."""

_LOGPROBS_PER_TOKEN = 4
"""How many log-probabilities cost as much as a token: to send, and to keep until the client takes them."""
_SHORT_HEAD_BYTES, _HEAD_BYTES = 48 * 2**10, 3 * 2**20
"""Bytes of an item that are looked at, the second for a picture whose header is longer. Every other request waits
meanwhile: for the first some microseconds, for the second milliseconds."""


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What requests take of a budget. See `config.Budget` for the units."""

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
        """Returns the name of the first resource of which there is more than `limit`, or None."""
        return next((name for name in RESOURCES if getattr(self, name) > getattr(limit, name)), None)


RESOURCES = tuple(one.name for one in fields(RequestCost))
_amounts = attrgetter(*RESOURCES)  # dataclasses.astuple takes almost thirty times as long


def cost_of(requests: Sequence[PipelineRequest], max_model_len: int) -> RequestCost:
    """Returns the cost of a client's request, which has one prompt or several, without what its URLs hold. An answer
    counts at most `max_model_len` tokens, however many the client asks for: the engine refuses more and says why."""
    tokens = sum(
        _with_logprobs(estimated_tokens(request.prompt), request.params.prompt_logprobs)
        + _with_logprobs(_num_answer_tokens(request, max_model_len), request.params.logprobs)
        for request in requests
    )
    pixels = sum(source.num_pixels for request in requests for source in request.media)
    return RequestCost(requests=len(requests), pixels=pixels, tokens=tokens)


def cost_of_text(num_chars: int) -> RequestCost:
    """Returns the cost of tokenising a text."""
    return RequestCost(requests=1, tokens=num_chars // CHARS_PER_TOKEN)


def data_url_pixels(source: MediaSource, limits: MediaLimits) -> int:
    """Returns the pixels of an item in the body. They are 0 for an item that is not in the body and for a malformed
    one, which is refused when it is loaded."""
    data = source.data
    if data is None or source.is_precomputed:
        return 0
    if source.modality == "video":
        head = data.head(_HEAD_BYTES)
        return work_pixels("video", head, limits) * -(-data.num_bytes // _HEAD_BYTES)
    head = data.head(_SHORT_HEAD_BYTES)
    if is_cut_off(head) and data.num_bytes > _SHORT_HEAD_BYTES:
        head = data.head(_HEAD_BYTES)
    pixels = header_pixels(head)
    if head and pixels is None and data.num_bytes > _HEAD_BYTES:
        return limits.max_image_pixels  # the client may have put so much before the size to hide it
    return min(pixels or data.num_bytes, limits.max_image_pixels) if head else 0


def _num_answer_tokens(request: PipelineRequest, max_model_len: int) -> int:
    most = _UNKNOWN_MAX_TOKENS if request.params.max_tokens is None else request.params.max_tokens
    return request.params.n * min(most, max_model_len)


def _with_logprobs(num_tokens: int, num_logprobs: int | None) -> int:
    return num_tokens + num_tokens * (num_logprobs or 0) // _LOGPROBS_PER_TOKEN
