"""Makes the pipeline's requests from a client's request."""

from dataclasses import replace

from raylens.deployments.api.generation import MediaFields
from raylens.deployments.endpoint.call import ApiCall
from raylens.deployments.endpoint.request_cost import RequestCost, data_url_pixels
from raylens.deployments.pipeline.last_picture import with_last_picture
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.schema import Prompt


class PipelineRequests:
    """`limits`: for the media of one request. `adds_all_images`: whether the prompt gets all pictures of a request, or
    only the last one."""

    def __init__(self, limits: MediaLimits, *, adds_all_images: bool = True) -> None:
        self._limits = limits
        self._adds_all_images = adds_all_images

    def make(
        self,
        call: ApiCall,
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
        """Returns the pipeline's request. An item outside the body takes its bytes and pixels from the call's budgets
        once it is fetched."""
        prompt, media = prompt_and_media if self._adds_all_images else with_last_picture(*prompt_and_media)
        return PipelineRequest(
            request_id=request_id,
            context=call.traced.context,
            prompt=prompt,
            media=[self._with_pixels(replace(source, texts=call.texts)) for source in media],
            params=params,
            options=body.mm_processor_kwargs or {},
            video_options=body.video_options,
            cache_salt=call.cache_salt,
            cache_key=cache_key,
            adapter=adapter,
            priority=priority,
            truncation=body.prompt_truncation(params.max_tokens),
            returns_prompt_ids=returns_prompt_ids,
            on_fetched=lambda num_bytes, num_pixels: call.ticket.take(RequestCost(bytes=num_bytes, pixels=num_pixels)),
        )

    def _with_pixels(self, source: MediaSource) -> MediaSource:
        return replace(source, num_pixels=data_url_pixels(source, self._limits))
