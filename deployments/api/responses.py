"""`POST /v1/responses`: text, pictures and tools in, text and calls out, whole or as OpenAI's typed events."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Discriminator, Field, PrivateAttr, Tag, field_validator, model_validator

from raylens.deployments.api.generation import AnyGenerationFields, StreamOptions
from raylens.deployments.api.messages import TemplateFields, media_of
from raylens.deployments.api.response_items import (
    AnyItem,
    AnyToolItem,
    InputMessage,
    Item,
    ReasoningItem,
    as_messages,
    said_in,
)
from raylens.deployments.api.tools import (
    MAX_TOOLS,
    Allowed,
    CallableTool,
    ForcedTool,
    FunctionName,
    HostedChoice,
    HostedTool,
    Selection,
    ToolFields,
    ToolMode,
    kind_of_tool,
)
from raylens.deployments.api.wire import Accepted, Metadata, Name, NotDone, OrAbsent, StageTimings, WireModel
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import Prompt


class TextFormat(WireModel):
    """`strict` is a hint: the answer is always valid against the schema."""

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
    verbosity: Accepted = None


Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Values of `include` that this server's answers never contain. `message.output_text.logprobs` is not implemented."""


class ChosenItem(ForcedTool):
    type: Literal["function", "custom"]
    name: FunctionName

    @property
    def tool_name(self) -> str:
        return self.name


class AllowedItems(Allowed[ChosenItem, ChosenItem]):
    type: Literal["allowed_tools"]


ItemChoice = Annotated[
    Annotated[ToolMode, Tag("Mode")]
    | Annotated[ChosenItem, Tag("Function")]
    | Annotated[ChosenItem, Tag("Custom")]
    | Annotated[AllowedItems, Tag("Allowed")]
    | Annotated[HostedChoice, Tag("Hosted")],
    Discriminator(kind_of_tool),
]


class ResponsesRequest(AnyGenerationFields, TemplateFields, ToolFields):
    """A request: the whole conversation, or what comes after a stored response."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=10_000, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextSettings | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: cut a prompt that is too long from the left, images whole"
    )
    tools: Annotated[list[AnyToolItem], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ItemChoice | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    previous_response_id: Name | None = Field(
        None, description="a stored response: its conversation, without its instructions, comes before input"
    )
    store: bool | None = Field(None, description="false: later requests cannot go on from the answer")
    background: bool = Field(False, description="answer at once, and make the response meanwhile")

    include: list[Included] | None = Field(None, description="accepted: no answer has anything of that")
    reasoning: Annotated[Any, Field(description="its effort is a variable of the model's chat template")] = None
    max_tool_calls: Accepted = None
    access_programs: Accepted = None

    conversation: NotDone = None
    prompt: NotDone = None
    context_management: NotDone = None
    image: NotDone = None
    top_logprobs: Literal[0] | None = None
    structured_outputs: NotDone = None
    response_format: NotDone = None
    previous_input_messages: NotDone = None
    enable_response_messages: NotDone = None
    _history: list[AnyItem] = PrivateAttr(default_factory=list)

    @field_validator("input")
    @classmethod
    def _holds_something_said(cls, value: str | list[Item]) -> str | list[Item]:
        if isinstance(value, list) and all(isinstance(item, ReasoningItem) for item in value):
            raise ValueError("has only reasoning: send a message, too")
        return value

    @model_validator(mode="after")
    def _truncates_in_one_way(self) -> Self:
        if self.truncation is not None and self.truncate_prompt_tokens is not None:
            raise ValueError("truncation and truncate_prompt_tokens cannot both be set")
        if self.truncation == "auto":
            self.truncate_prompt_tokens = -1
        return self

    @model_validator(mode="after")
    def _is_kept_in_the_background(self) -> Self:
        if self.background and (self.stream or self.store is False):
            raise ValueError("background needs store, and does not stream: ask for the response by its id")
        return self

    def tools_and_choice(self) -> tuple[list[CallableTool], ToolMode | Selection]:
        tools = [tool.as_tool() for tool in self.tools or () if not isinstance(tool, HostedTool)]
        choice = self.tool_choice or "auto"
        return tools, choice if isinstance(choice, str) else choice.choice

    def go_on_from(self, history: list[AnyItem]) -> None:
        """Puts the items of the stored conversation before those of `input`."""
        self._history = history

    @property
    def items(self) -> list[AnyItem]:
        """The items of `input`."""
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else list(self.input)

    @property
    def field_names(self) -> Mapping[str, str]:
        names = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
        names |= {"json_schema": "text.format.schema", "json_object": "text.format"}
        return {**names, "grammar": "tools"} if self.offered.is_forced else names

    def prompts_and_media(self) -> list[tuple[Prompt, list[MediaSource]]]:
        opening = [] if self.instructions is None else [InputMessage(role="system", content=self.instructions)]
        effort = self.reasoning.get("effort") if isinstance(self.reasoning, dict) else None
        prompt = self.chat_prompt(as_messages([*opening, *self._history, *self.items]), self.offered.tools, effort)
        earlier = media_of(map(said_in, self._history), "previous_response_id")
        return [(prompt, earlier + media_of(map(said_in, self.items), "input"))]

    def sampling_params(self, call_grammar: StructuredOutput | None = None) -> SamplingParams:
        form = None if self.text is None or self.text.format is None else self.text.format.structured_output
        return self.make_sampling_params(
            max_tokens=self.max_output_tokens, structured_output=form if call_grammar is None else call_grammar
        )


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    """The thoughts before the answer."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: list[Any] = []
    content: list[ReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


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


class OutputCall(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputCustomCall(BaseModel):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    call_id: str
    name: str
    input: str
    status: Literal["in_progress", "completed", "incomplete"]


OutputItem = OutputReasoning | OutputMessage | OutputCall | OutputCustomCall


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(BaseModel):
    """An answer, possibly still incomplete. `error` and `incomplete_details` say why."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    metadata: dict[str, str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool = True
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    previous_response_id: str | None = None
    store: bool = False
    background: bool = False
    stage_timings: OrAbsent[StageTimings] = None


class ResponseEvent(BaseModel):
    """One event of a stream. `type` tells which of the other fields are set."""

    type: str
    sequence_number: int
    response: OrAbsent[ResponseObject] = None
    item_id: OrAbsent[str] = None
    output_index: OrAbsent[int] = None
    content_index: OrAbsent[int] = None
    item: OrAbsent[OutputItem] = None
    part: OrAbsent[OutputText | ReasoningText] = None
    delta: OrAbsent[str] = None
    text: OrAbsent[str] = None
    name: OrAbsent[str] = None
    arguments: OrAbsent[str] = None
    input: OrAbsent[str] = None
    logprobs: OrAbsent[list[Any]] = None
