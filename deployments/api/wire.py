"""What all wire types share: strictness, usage, timings and errors."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_MAX_FIELDS = 100


class WireModel(BaseModel):
    """Fields that the server does not know are refused: silently ignored ones mislead the client."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, data: object) -> object:
        # Each unknown one would be an error of its own.
        if isinstance(data, dict) and len(data) > _MAX_FIELDS:
            raise ValueError(f"{len(data)} fields, the limit is {_MAX_FIELDS}")
        return data


def at_most(limit: int) -> BeforeValidator:
    """For dicts, of which pydantic would check every entry before it counts them."""

    def check(data: object) -> object:
        if isinstance(data, dict) and len(data) > limit:
            raise ValueError(f"{len(data)} entries, the limit is {limit}")
        return data

    return BeforeValidator(check)


Name = Annotated[str, Field(min_length=1, max_length=256)]
"""What a client calls something by."""


Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(16)]
"""Of a client's own, given back where the API gives it back."""


_T = TypeVar("_T")
OrAbsent = Annotated[_T | None, Field(exclude_if=lambda value: value is None)]
"""What an answer leaves out where it is not set. Other fields of answers that are not set are null, as OpenAI's are."""


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class StageTimings(BaseModel):
    """The stage waterfall of one request, in seconds; a stage that was skipped is absent. Hits count items."""

    seconds: dict[str, float]
    time_to_first_token: float
    total: float
    processor_cache_hits: int
    embedding_cache_hits: int


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """OpenAI's form of an error, for every status above 399."""

    error: ErrorBody
