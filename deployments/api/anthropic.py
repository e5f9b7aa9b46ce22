"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

https://docs.claude.com/en/api/messages"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Discriminator, Field, Tag, model_validator

from raylens.deployments.api.content import MediaPart, Part, SaidPart, TextPart, Url, template_content
from raylens.deployments.api.generation import AnyGenerationFields
from raylens.deployments.api.messages import TemplateFields, thought_form
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
    call_form,
    flat_enough,
)
from raylens.deployments.api.wire import Accepted, Name, NotDone, OrAbsent, StageTimings, WireModel
from raylens.deployments.pipeline.media_source import MediaSource, upload_url
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import Message, Prompt


class Base64Source(WireModel):
    type: Literal["base64"]
    media_type: Annotated[str, Field(max_length=100)]
    data: str


class UrlSource(WireModel):
    type: Literal["url"]
    url: Url


class FileSource(WireModel):
    type: Literal["file"]
    file_id: Name


class _OriginBlock(MediaPart):
    origin: Annotated[Base64Source | UrlSource | FileSource, Field(alias="source", discriminator="type")]

    @property
    def url(self) -> str:
        match self.origin:
            case Base64Source():
                return f"data:{self.origin.media_type};base64,{self.origin.data}"
            case UrlSource():
                return self.origin.url
            case FileSource():
                return upload_url(self.origin.file_id)


class ImageBlock(_OriginBlock):
    type: Literal["image"]


class DocumentBlock(_OriginBlock):
    """A PDF, whose pages are pictures."""

    modality = "document"
    type: Literal["document"]
    title: Accepted = None
    context: Accepted = None
    citations: Accepted = None


class TextBlock(TextPart):
    citations: Accepted = None


class SearchResultBlock(Part):
    """What a source says that the client has found."""

    type: Literal["search_result"]
    title: str
    source: str
    content: Annotated[list[TextBlock], Field(max_length=10_000, fail_fast=True)]
    citations: Accepted = None

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content), ""])


class ToolReferenceBlock(Part):
    """A deferred tool that the client has found for the model, which may call it from now on."""

    type: Literal["tool_reference"]
    tool_name: FunctionName

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} was found.\n"


class NamedTool(WireModel):
    type: Literal["tool_reference"]
    name: FunctionName


class ToolChangeBlock(WireModel):
    """Offers a deferred tool, or withdraws one."""

    type: Literal["tool_addition", "tool_removal"]
    tool: NamedTool
    cache_control: Accepted = None


_Block = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")
]
Blocks = Annotated[list[_Block], Field(max_length=10_000, fail_fast=True)]


class ToolResultBlock(WireModel):
    """The result of a tool call. `is_error`: the text says so itself."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Blocks = ""
    is_error: Accepted = None
    cache_control: Accepted = None


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: Name
    name: FunctionName
    input: Annotated[dict[str, Any], AfterValidator(flat_enough)]
    cache_control: Accepted = None


class ThinkingBlock(WireModel):
    """Earlier thoughts. `signature`: of another server."""

    type: Literal["thinking"]
    thinking: str
    signature: Accepted = None


class RedactedThinkingBlock(WireModel):
    """Thoughts that another server encrypted. They are ignored."""

    type: Literal["redacted_thinking"]
    data: Accepted = None


Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolResultBlock
    | ToolUseBlock
    | ToolChangeBlock
    | ThinkingBlock
    | RedactedThinkingBlock,
    Field(discriminator="type"),
]

_ROLES = {
    "tool_result": "user",
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
}
"""Of blocks that only one role has."""


class Turn(WireModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=10_000, fail_fast=True)]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> Self:
        for block in () if isinstance(self.content, str) else self.content:
            role = _ROLES.get(block.type, self.role)
            if role != self.role:
                raise ValueError(f"{block.type} may stand in messages of role {role} only")
        return self

    def template_forms(self) -> Iterator[Message]:
        """Yields the messages for chat templates. Results of tools come before what a user says."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        blocks = self.content
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        for one in results:
            yield {"role": "tool", "tool_call_id": one.tool_use_id, "content": template_content(one.content)}
        said: list[SaidPart | MediaPart] = [
            block for block in blocks if isinstance(block, TextBlock | SearchResultBlock | MediaPart)
        ]
        thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        message: Message = {"role": self.role, **thought_form(thought)}
        if calls := [block for block in blocks if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = [call_form(call.id, call.name, call.input) for call in calls]
        if said or not calls:
            message["content"] = template_content(said)
        if not blocks or any(not isinstance(block, ToolResultBlock | ToolChangeBlock) for block in blocks):
            yield message

    def tool_changes(self) -> Iterator[tuple[str, bool]]:
        """Yields names of tools, each with whether the model may call it from now on."""
        for block in () if isinstance(self.content, str) else self.content:
            if isinstance(block, ToolChangeBlock):
                yield block.tool.name, block.type == "tool_addition"
            elif isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                yield from ((one.tool_name, True) for one in block.content if isinstance(one, ToolReferenceBlock))

    def media(self, field: str) -> list[MediaSource]:
        """Returns the pictures and documents, in the order of `template_forms`. `field`: the client's name for the
        message."""
        if isinstance(self.content, str):
            return []
        found = list[MediaSource]()
        for number, block in enumerate(self.content):
            if isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                found += _media_of(block.content, f"{field}.content[{number}]")
        return found + _media_of(self.content, field)


def _media_of(blocks: Sequence[object], field: str) -> list[MediaSource]:
    return [
        block.source(f"{field}.content[{number}].{block.type}")
        for number, block in enumerate(blocks)
        if isinstance(block, MediaPart)
    ]


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
            both = [
                [{"type": "text", "text": one}] if isinstance(one, str) else one
                for one in (merged[-1]["content"], message["content"])
            ]
            merged[-1] = {"role": "user", "content": [*both[0], {"type": "text", "text": "\n"}, *both[1]]}
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
