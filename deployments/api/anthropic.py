"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

https://docs.claude.com/en/api/messages"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, model_validator

from raylens.deployments.api.anthropic_turns import TextBlock, Turn
from raylens.deployments.api.content import template_content
from raylens.deployments.api.generation import AnyGenerationFields
from raylens.deployments.api.messages import TemplateFields
from raylens.deployments.api.tools import (
    MAX_TOOLS,
    CallableTool,
    FunctionDefinition,
    FunctionName,
    HostedTool,
    Selection,
    Tool,
    ToolFields,
    ToolMode,
    flat_enough,
)
from raylens.deployments.api.wire import Accepted, NotDone, OrAbsent, StageTimings, WireModel
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import Message, Prompt, parts_of


class InputTool(WireModel):
    """A function that the model may call. `defer_loading`: only once a block of a message names it."""

    name: FunctionName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(flat_enough)]
    cache_control: Accepted = None
    strict: Accepted = None
    defer_loading: bool | None = None
    allowed_callers: Accepted = None
    input_examples: Accepted = None
    eager_input_streaming: Accepted = None

    def as_tool(self) -> Tool:
        function = FunctionDefinition(name=self.name, description=self.description, parameters=self.input_schema)
        return Tool(type="function", function=function)


def _kind_of_tool(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "Function" if kind in (None, "custom") else "Hosted"


class ToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False


class Thinking(WireModel):
    """`display` has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, description="the same as thinking_token_budget")
    display: Accepted = None


class OutputFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireModel):
    effort: str | None = None
    format: OutputFormat | None = None


class ConversationFields(AnyGenerationFields, TemplateFields, ToolFields):
    """The fields that make up the prompt."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=10_000, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(max_length=1000, fail_fast=True)] | None = None
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[InputTool, Tag("Function")] | Annotated[HostedTool, Tag("Hosted")],
                    Discriminator(_kind_of_tool),
                ]
            ],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="disabled: the template's enable_thinking is false")
    output_config: OutputConfig | None = Field(
        None, description="effort: a variable of the model's chat template; format: the answer's JSON schema"
    )
    cache_control: Accepted = None
    context_management: Accepted = None
    container: NotDone = None
    diagnostics: Accepted = None
    inference_geo: Accepted = None
    speed: Accepted = None
    user_profile_id: Accepted = None
    workspace_id: Accepted = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not any(True for turn in self.messages for _ in turn.template_forms()):
            raise ValueError("messages: they change tools and say nothing")
        return self

    @model_validator(mode="after")
    def _takes_budget_of_thinking(self) -> Self:
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            self.thinking_token_budget = self.thinking.budget_tokens
        return self

    def tools_and_choice(self) -> tuple[list[CallableTool], ToolMode | Selection]:
        given = self.tools or ()
        # Where the server of another API would search for deferred tools, nothing names them.
        is_searched = any(isinstance(one, HostedTool) and one.type.startswith("tool_search_tool") for one in given)
        changes = dict(change for turn in self.messages for change in turn.tool_changes())
        tools: list[CallableTool] = [
            one.as_tool()
            for one in given
            if isinstance(one, InputTool) and changes.get(one.name, is_searched or not one.defer_loading)
        ]
        choice = self.tool_choice
        if choice is None or choice.type == "auto":
            return tools, "auto"
        if choice.type != "tool":
            return tools, "required" if choice.type == "any" else "none"
        if choice.name is None:
            raise ValueError("tool_choice.name has to be set where its type is tool")
        return tools, Selection(frozenset({choice.name}), is_forced=True)

    @property
    def wants_single_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use

    @property
    def field_names(self) -> Mapping[str, str]:
        names = {"prompt": "messages", "stop": "stop_sequences", "json_schema": "output_config.format.schema"}
        return {**names, "grammar": "tools"} if self.offered.is_forced else names

    def prompts_and_media(self) -> list[tuple[Prompt, list[MediaSource]]]:
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": template_content(self.system)})
        for turn in self.messages:
            messages += turn.template_forms()
        self.continue_final_message = self.messages[-1].role == "assistant" and "tool_calls" not in messages[-1]
        prompt = self.chat_prompt(
            _merged(messages), self.offered.tools, None if self.output_config is None else self.output_config.effort
        )
        if self.thinking is not None:
            variables = {"enable_thinking": self.thinking.type != "disabled"}
            prompt = replace(prompt, template_kwargs=variables | prompt.template_kwargs)
        media = [one for index, turn in enumerate(self.messages) for one in turn.media(f"messages[{index}]")]
        return [(prompt, media)]


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with those of users in a row as one: many templates want users and assistants in turn."""
    merged: list[Message] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] == "user":
            both = [*parts_of(merged[-1]), {"type": "text", "text": "\n"}, *parts_of(message)]
            merged[-1] = {"role": "user", "content": both}
        else:
            merged.append(message)
    return merged


class MessagesRequest(ConversationFields):
    max_tokens: int = Field(ge=1, description="the most tokens of an answer, within what the context leaves")
    stop: list[str] | None = Field(None, alias="stop_sequences")
    metadata: Accepted = None
    service_tier: Accepted = None

    def sampling_params(self, call_grammar: StructuredOutput | None = None) -> SamplingParams:
        form = None if self.output_config is None else self.output_config.format
        structured = None if form is None else StructuredOutput(json_schema=form.json_schema)
        return self.make_sampling_params(
            max_tokens=self.max_tokens, structured_output=structured if call_grammar is None else call_grammar
        )


class CountedTokens(BaseModel):
    input_tokens: int


class AnswerTextBlock(BaseModel):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class AnswerThinkingBlock(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class AnswerToolUseBlock(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerTextBlock | AnswerThinkingBlock | AnswerToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(BaseModel):
    """`input_tokens`: of the prompt, without the cached ones."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class AnswerMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    stage_timings: OrAbsent[StageTimings] = None


class MessageDelta(BaseModel):
    """Why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageEvent(BaseModel):
    """One event of a stream. `type` tells which of the other fields are set."""

    type: str
    message: OrAbsent[AnswerMessage] = None
    index: OrAbsent[int] = None
    content_block: OrAbsent[AnswerBlock] = None
    delta: OrAbsent[MessageDelta | dict[str, str]] = None
    usage: OrAbsent[MessageUsage] = None


class AnthropicError(BaseModel):
    """`param`, `code`: as in errors of OpenAI's API."""

    type: str
    message: str
    param: OrAbsent[str] = None
    code: OrAbsent[str] = None


class AnthropicErrorResponse(BaseModel):
    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str | None = None
