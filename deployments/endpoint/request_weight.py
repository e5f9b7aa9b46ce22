"""The weight of a request, estimated before anything of it is decoded: pixels by headers, tokens by characters."""

from collections.abc import Sequence
from dataclasses import replace

from raylens.deployments.api.generation import MediaFields
from raylens.deployments.endpoint.call import Call
from raylens.deployments.item_store.weight import Weight
from raylens.deployments.pipeline.last_picture import with_last_picture
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.deployments.pipeline.pipeline_request import CHARS_PER_TOKEN, PipelineRequest, estimated_tokens
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.pixel_count import header_pixels, is_cut_off, work_pixels
from raylens.preprocess.schema import Prompt

_UNKNOWN_MAX_TOKENS = 1024
"""The tokens that count for an answer which may be as long as the context has room for."""

_LOGPROBS_PER_TOKEN = 4
"""How many log-probabilities cost as much as a token: to send, and to keep until the client takes them."""
_SHORT_HEAD_BYTES, _HEAD_BYTES = 48 * 2**10, 3 * 2**20
"""Bytes of an item that are looked at, the second for a picture whose header is longer. Every other request waits
meanwhile: for the first some microseconds, for the second milliseconds."""


class WeighedRequests:
    """Makes the pipeline's requests from a client's request, and weighs them. `limits`: the most that one request may
    bring. `adds_all_images`: whether the prompt gets all pictures of a request, or the last one alone."""

    def __init__(self, limits: MediaLimits, *, adds_all_images: bool = True) -> None:
        self._limits = limits
        self._adds_all_images = adds_all_images

    def __call__(
        self,
        call: Call,
        request_id: str,
        body: MediaFields,
        params: SamplingParams,
        prompt_and_media: tuple[Prompt, list[MediaSource]],
        *,
        priority: int = 0,
        cache_key: str | None = None,
        adapter: str | None = None,
        returns_prompt_ids: bool = False,
    ) -> PipelineRequest:
        """Returns the pipeline's request. For each item that was not in the body it takes more of the call's budgets,
        once the item is fetched."""
        prompt, media = prompt_and_media if self._adds_all_images else with_last_picture(*prompt_and_media)
        return PipelineRequest(
            request_id=request_id,
            context=call.traced.context,
            prompt=prompt,
            media=[self._weighed(replace(source, texts=call.texts)) for source in media],
            params=params,
            options=body.mm_processor_kwargs or {},
            video_options=body.video_options,
            cache_salt=call.cache_salt,
            cache_key=cache_key,
            adapter=adapter,
            priority=priority,
            truncation=body.prompt_truncation(params.max_tokens),
            returns_prompt_ids=returns_prompt_ids,
            on_fetched=lambda num_bytes, num_pixels: call.ticket.take(Weight(bytes=num_bytes, pixels=num_pixels)),
        )

    def weigh(self, requests: Sequence[PipelineRequest], max_model_len: int) -> Weight:
        """Returns the weight of a client's request, which has one prompt or several, without what its URLs hold. An
        answer counts at most `max_model_len` tokens, however many the client asks for: the engine refuses more and says
        why."""
        tokens = sum(
            _with_logprobs(estimated_tokens(request.prompt), request.params.prompt_logprobs)
            + _with_logprobs(_num_answer_tokens(request, max_model_len), request.params.logprobs)
            for request in requests
        )
        pixels = sum(source.num_pixels for request in requests for source in request.media)
        return Weight(requests=len(requests), pixels=pixels, tokens=tokens)

    def _weighed(self, source: MediaSource) -> MediaSource:
        return replace(source, num_pixels=_data_url_pixels(source, self._limits))


def weigh_text(num_chars: int) -> Weight:
    """Returns the weight of tokenising a text."""
    return Weight(requests=1, tokens=num_chars // CHARS_PER_TOKEN)


def _num_answer_tokens(request: PipelineRequest, max_model_len: int) -> int:
    most = _UNKNOWN_MAX_TOKENS if request.params.max_tokens is None else request.params.max_tokens
    return request.params.n * min(most, max_model_len)


def _with_logprobs(num_tokens: int, num_logprobs: int | None) -> int:
    return num_tokens + num_tokens * (num_logprobs or 0) // _LOGPROBS_PER_TOKEN


def _data_url_pixels(source: MediaSource, limits: MediaLimits) -> int:
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
