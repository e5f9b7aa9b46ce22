"""What all wire types share: strictness, text that is Unicode, usage, timings and errors."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class WireModel(BaseModel):
    """Fields that the server does not know are refused: silently ignored ones mislead the client."""

    model_config = ConfigDict(extra="forbid")


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is not valid Unicode text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Name = Annotated[Text, Field(min_length=1, max_length=256)]
"""What a client calls something by."""


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
