"""Fields of a request that say what comes of its prompts and media on their way, whatever the answer is."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from raylens.deployments.api.wire import Accepted, OptionName, RequestBody, WireModel, at_most
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.preprocess.schema import InvalidRequestError, Prompt, PromptTruncation

_ANSWER_ROOM = 256
"""Room for an answer, in tokens, when a prompt is cut to the context and the client sets no length."""

PromptAndMedia = tuple[Prompt, list[MediaSource]]
"""A prompt for the pipeline, and its items in the prompt's order."""

MAX_TIMEOUT_S = 86_400.0
"""The longest time limit that a client may set."""


class VideoIO(WireModel):
    """The frames of each video that the model gets."""

    num_frames: int | None = Field(None, ge=1, description="at most; a shorter video keeps all its frames")
    fps: float | None = Field(None, gt=0, description="frames per second at most")


class MediaIO(WireModel):
    """vLLM's settings for reading media, by kind of media."""

    video: VideoIO | None = None


class MediaFields(RequestBody):
    """Settings for the media of a request and for the truncation of its prompt."""

    mm_processor_kwargs: Annotated[dict[OptionName, bool | int | float | str], at_most(16)] | None = Field(
        None, description="settings of the model's processor for this request's media, e.g. max_pixels"
    )
    media_io_kwargs: MediaIO | None = Field(
        None, description="how many frames of a video the model gets; the same as num_frames and fps of the processor"
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        description="cut a longer prompt from the left to so many tokens, images whole; -1: to what the context leaves"
        " beside max_tokens",
    )

    truncation_side: Literal["left"] | None = Field(None, description="a prompt is cut from the left")

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _leaves_something(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("has to be at least 1, or -1")
        return value

    @model_validator(mode="after")
    def _sets_each_option_once(self) -> Self:
        if twice := self.video_options.keys() & (self.mm_processor_kwargs or {}).keys():
            raise ValueError(f"{min(twice)} is set in media_io_kwargs.video and in mm_processor_kwargs")
        return self

    @property
    def video_options(self) -> dict[str, Any]:
        """The processor's settings for the request's videos only."""
        video = None if self.media_io_kwargs is None else self.media_io_kwargs.video
        return {} if video is None else video.model_dump(exclude_none=True)

    def prompt_truncation(self, max_tokens: int | None) -> PromptTruncation | None:
        """Returns how to cut a prompt. `max_tokens`: the length of its answer; None: as long as the context allows."""
        if self.truncate_prompt_tokens is None:
            return None
        if self.truncate_prompt_tokens == -1:
            return PromptTruncation(num_answer_tokens=_ANSWER_ROOM if max_tokens is None else max_tokens)
        return PromptTruncation(self.truncate_prompt_tokens)


class PromptFields(MediaFields):
    """The fields that all APIs share. `most_at_once`: the prompts of one request that are in work together."""

    most_at_once: ClassVar[int] = 1

    model: str | None = Field(None, description="default: the first model")
    priority: Annotated[int, AfterValidator(lambda value: max(0, value))] = Field(
        0, le=1000, description="requests with a lower one go first where they have to wait; below 0: the same as 0"
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_S,
        description="seconds until the request is given up, in place of x-request-timeout-s",
    )
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="requests with the same one go to the same replica of the language model, if it has room"
    )
    session_id: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="the same as prompt_cache_key, which goes before it"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="only requests with the same one share the prefix cache"
    )
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = Field(
        None, description="makes up the answer's id, in place of x-request-id"
    )
    user: Accepted = None

    @property
    def field_names(self) -> Mapping[str, str]:
        """This API's names for fields that have other names in the stages."""
        raise NotImplementedError

    def in_terms_of_client(self, error: InvalidRequestError) -> InvalidRequestError:
        """Returns the error with this API's name for its field."""
        return error.for_field(self.field_names.get(error.field, error.field))
