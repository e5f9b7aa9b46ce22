"""`POST /v1/chat/completions`: the conversation, and the answer whole or in chunks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from raylens.deployments.api.generation import GenerationFields
from raylens.deployments.api.messages import Messages, TemplateFields
from raylens.deployments.api.tools import (
    MAX_TOOLS,
    AnyTool,
    CallableTool,
    HostedTool,
    Selection,
    ToolChoice,
    ToolFields,
    ToolMode,
)
from raylens.deployments.api.wire import Accepted, NotDone, OrAbsent, PromptLogprobs, StageTimings, Usage
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.llm.sampling import bounds
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import Prompt


class ChatCompletionRequest(GenerationFields, TemplateFields, ToolFields):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="goes before max_tokens")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounds.NUM_LOGPROBS] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = Field(
        None, max_length=32, description="a variable of the model's chat template; none: enable_thinking is false"
    )
    include_reasoning: bool | None = Field(None, description="false: leave the thoughts out of the answer")
    verbosity: Accepted = None
    prediction: Accepted = None

    audio: NotDone = None
    functions: NotDone = None
    function_call: NotDone = None
    web_search_options: NotDone = None
    best_of: NotDone = None
    echo: NotDone = None
    documents: NotDone = None
    add_special_tokens: NotDone = None

    @model_validator(mode="after")
    def _names_tokens_of_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs may be set only where logprobs is true")
        if self.logprob_token_ids and not self.logprobs:
            raise ValueError("logprob_token_ids may be set only where logprobs is true")
        return self

    def tools_and_choice(self) -> tuple[list[CallableTool], ToolMode | Selection]:
        tools: list[CallableTool] = [tool for tool in self.tools or () if not isinstance(tool, HostedTool)]
        choice = self.tool_choice or "auto"
        return tools, choice if isinstance(choice, str) else choice.choice

    @property
    def field_names(self) -> Mapping[str, str]:
        names = {**super().field_names, "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return {**names, "grammar": "tools"} if self.offered.is_forced else names

    def prompts_and_media(self) -> list[tuple[Prompt, list[MediaSource]]]:
        return [self.chat_and_media(self.messages, self.offered.tools, self.reasoning_effort)]

    def sampling_params(self, call_grammar: StructuredOutput | None = None) -> SamplingParams:
        return self.make_sampling_params(
            max_tokens=self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens,
            n=self.num_answers,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            logprob_token_ids=tuple(self.logprob_token_ids),
            structured_output=self.structured_output if call_grammar is None else call_grammar,
        )


@dataclass(slots=True)  # a pydantic model would validate the server's own values, 20 times a token
class TokenLogprob:
    """A token's text, its bytes (possibly a part of a character) and its log-probability in nats."""

    token: str
    logprob: float
    bytes: list[int]


@dataclass(slots=True)
class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


@dataclass(slots=True)
class AnswerFunction:
    """`arguments`: JSON as the model wrote it, which an answer that is cut off leaves open."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class AnswerInput:
    """`input`: the text for a custom tool."""

    name: str
    input: str = ""


@dataclass(slots=True)
class AnswerCall:
    """A call of a function."""

    id: str
    function: AnswerFunction
    type: Literal["function"] = "function"


@dataclass(slots=True)
class AnswerCustomCall:
    """A call of a custom tool."""

    id: str
    custom: AnswerInput
    type: Literal["custom"] = "custom"


class AssistantMessage(BaseModel):
    """`reasoning`: the thoughts before the answer, under both names that clients know."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning: OrAbsent[str] = None
    reasoning_content: OrAbsent[str] = None
    refusal: None = None
    tool_calls: OrAbsent[list[AnswerCall | AnswerCustomCall]] = None


class Choice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None
    token_ids: OrAbsent[list[int]] = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: OrAbsent[list[int]] = None
    prompt_logprobs: OrAbsent[PromptLogprobs] = None
    stage_timings: OrAbsent[StageTimings] = None


class FunctionDelta(BaseModel):
    """The name comes in a call's first chunk. The arguments are appended."""

    name: OrAbsent[str] = None
    arguments: str


class InputDelta(BaseModel):
    """The name comes in a call's first chunk. The input is appended."""

    name: OrAbsent[str] = None
    input: str


class ToolCallDelta(BaseModel):
    """The next part of a tool call. Its id and type come in the first."""

    index: int
    id: OrAbsent[str] = None
    type: OrAbsent[Literal["function", "custom"]] = None
    function: OrAbsent[FunctionDelta] = None
    custom: OrAbsent[InputDelta] = None


class Delta(BaseModel):
    role: OrAbsent[Literal["assistant"]] = None
    content: OrAbsent[str] = None
    reasoning: OrAbsent[str] = None
    reasoning_content: OrAbsent[str] = None
    tool_calls: OrAbsent[list[ToolCallDelta]] = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    token_ids: OrAbsent[list[int]] = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: OrAbsent[list[int]] = None
    stage_timings: OrAbsent[StageTimings] = None
