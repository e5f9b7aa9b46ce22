"""The wire types of the OpenAI-compatible API, and how they become what the pipeline takes."""

import time
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from deployments.media_items import MediaSource
from llm.sampling_params import SamplingParams
from llm.structured_output import StructuredOutput
from preprocess.schema import InvalidRequestError


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


OptionName = Annotated[Text, Field(max_length=64)]


class TextPart(WireModel):
    type: Literal["text"]
    text: Text


class ImageUrl(WireModel):
    """`detail` is a hint that the server is free to ignore; it always looks closely."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(WireModel):
    """`uuid` is the client's own name for the picture: once sent with it, the name alone will do for as long as the
    server keeps the picture."""

    type: Literal["image_url"]
    image_url: ImageUrl | None = None
    uuid: Annotated[Text, Field(min_length=1, max_length=256)] | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "ImagePart":
        if self.image_url is None and self.uuid is None:
            raise ValueError("needs image_url, uuid or both")
        return self


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(WireModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[ContentPart]
    name: None = None
    # What the official client returns in an assistant message and sends back in the next turn.
    refusal: None = None
    annotations: None = None
    audio: None = None
    tool_calls: None = None
    function_call: None = None


class StreamOptions(WireModel):
    include_usage: bool = False


class JsonSchema(WireModel):
    """`strict` is a hint: the answer always is valid against the schema."""

    name: Text
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None


class ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError('json_schema has to be set where type is "json_schema", and only there')
        return self

    @property
    def structured_output(self) -> StructuredOutput | None:
        if self.json_schema is not None and self.json_schema.json_schema is not None:
            return StructuredOutput(json_schema=self.json_schema.json_schema)
        return None if self.type == "text" else StructuredOutput(json_object=True)


class StructuredOutputs(WireModel):
    """Forms of answers beyond OpenAI's API, named as by vLLM; exactly one is to be set."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None

    @property
    def structured_output(self) -> StructuredOutput:
        choice = None if self.choice is None else tuple(self.choice)
        return StructuredOutput(json_schema=self.json_schema, regex=self.regex, choice=choice, grammar=self.grammar)


class ChatCompletionRequest(WireModel):
    """`POST /v1/chat/completions`. Fields typed to one value are accepted only where they change nothing."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = Field(None, description="added to the logits, by token id")
    seed: int | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[int] = Field([], description="tokens that end the answer, as the model's end tokens do")
    ignore_eos: bool = False
    stage_timings: bool = Field(False, description="add the time of each stage, in seconds, to the answer")
    return_token_ids: bool = Field(False, description="add the ids of the prompt and of the answer's tokens")
    mm_processor_kwargs: dict[OptionName, bool | int | float | str] | None = Field(
        None, max_length=16, description="settings of the model's processor for this request's media, e.g. max_pixels"
    )
    n: Literal[1] | None = 1
    logprobs: Literal[False] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> "ChatCompletionRequest":
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("response_format and structured_outputs cannot both be set")
        return self

    def sampling_params(self) -> SamplingParams:
        form = self.structured_outputs or self.response_format
        return SamplingParams(
            max_tokens=self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            structured_output=None if form is None else form.structured_output,
        )

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them; pictures become placeholders without their data."""
        return [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": _template_content(message.content),
            }
            for message in self.messages
        ]

    def media(self) -> list[MediaSource]:
        """Every picture, in the order of the prompt."""
        found = []
        for i, message in enumerate(self.messages):
            for j, part in enumerate(message.content if isinstance(message.content, list) else []):
                if isinstance(part, ImagePart):
                    field = f"messages[{i}].content[{j}].image_url"
                    if message.role != "user":
                        raise InvalidRequestError("only user messages may hold pictures", field=field)
                    url = None if part.image_url is None else part.image_url.url
                    found.append(MediaSource(url, field, uuid=part.uuid))
        return found


def _template_content(content: str | list[TextPart | ImagePart]) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"} for part in content
    ]


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


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    index: int = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: str | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    stage_timings: StageTimings | None = None


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    stage_timings: StageTimings | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "raylens"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """OpenAI's form of an error, for every status above 399."""

    error: ErrorBody
