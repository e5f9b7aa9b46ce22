"""`POST /v1/responses`: text and pictures in, text out, whole or as OpenAI's typed events."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from deployments.api.content import InputImagePart, template_content
from deployments.api.generation import AnyGenerationFields
from deployments.api.messages import media_of_messages
from deployments.api.wire import Metadata, Name, OrAbsent, StageTimings, WireModel
from deployments.media_source import MediaSource
from llm.sampling_params import SamplingParams
from llm.structured_output import StructuredOutput
from preprocess.schema import ChatPrompt, Message


class InputText(WireModel):
    """`output_text` is what an answer of before holds; what the server said of it goes unread."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


InputPart = Annotated[InputText | InputImagePart, Field(discriminator="type")]


class InputMessage(WireModel):
    """A turn of the conversation, as a client writes it or as an answer's output holds it."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(max_length=10_000, fail_fast=True)]
    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: None = None

    def template_form(self) -> Message:
        """As chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": template_content(self.content)}


class TextFormat(WireModel):
    """`strict` is a hint: the answer always is valid against the schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @property
    def structured_output(self) -> StructuredOutput | None:
        if self.type == "json_schema":
            return StructuredOutput(json_schema=self.json_schema or {"type": "object"})
        return StructuredOutput(json_object=True) if self.type == "json_object" else None


class TextSettings(WireModel):
    format: TextFormat | None = None
    verbosity: None = None


class ResponsesRequest(AnyGenerationFields):
    """Fields typed to one value are accepted only where they change nothing: nothing is kept on the server, so a
    conversation is sent whole each time."""

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextSettings | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: cut a prompt that is too long from the left, images whole"
    )
    store: bool | None = Field(None, description="answers are never kept, whatever this says")
    metadata: Metadata | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _truncates_in_one_way(self) -> "ResponsesRequest":
        if self.truncation is not None and self.truncate_prompt_tokens is not None:
            raise ValueError("truncation and truncate_prompt_tokens cannot both be set")
        if self.truncation == "auto":
            self.truncate_prompt_tokens = -1
        return self

    @property
    def messages(self) -> list[InputMessage]:
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input

    @property
    def field_names(self) -> Mapping[str, str]:
        names = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
        return {**names, "json_schema": "text.format.schema", "json_object": "text.format"}

    def prompt(self) -> ChatPrompt:
        opening = [] if self.instructions is None else [InputMessage(role="system", content=self.instructions)]
        return ChatPrompt([message.template_form() for message in [*opening, *self.messages]])

    def media(self) -> list[MediaSource]:
        """Every picture, in the order of the prompt. Raises InvalidRequestError."""
        return media_of_messages(self.messages, "input")

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError."""
        form = None if self.text is None or self.text.format is None else self.text.format.structured_output
        return SamplingParams(
            max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p, structured_output=form
        )


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    code: str
    message: str


class ResponseObject(BaseModel):
    """An answer, or what there is of it. `error` and `incomplete_details` say why it is not all."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage]
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    metadata: dict[str, str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool = False
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    store: Literal[False] = False
    stage_timings: OrAbsent[StageTimings] = None


class ResponseEvent(BaseModel):
    """One of a stream: `type` tells which of the other fields are there."""

    type: str
    sequence_number: int
    response: OrAbsent[ResponseObject] = None
    item_id: OrAbsent[str] = None
    output_index: OrAbsent[int] = None
    content_index: OrAbsent[int] = None
    item: OrAbsent[OutputMessage] = None
    part: OrAbsent[OutputText] = None
    delta: OrAbsent[str] = None
    text: OrAbsent[str] = None
    logprobs: OrAbsent[list[Any]] = None
