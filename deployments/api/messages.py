"""The messages of a conversation, and their conversion to the pipeline's prompt and media."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from raylens.deployments.api.content import Content, ContentPart, MediaPart, template_content
from raylens.deployments.api.tools import MAX_TOOLS, AnyToolCall, CallableTool
from raylens.deployments.api.wire import Accepted, Name, NotDone, OptionName, WireModel, at_most
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.preprocess.schema import ChatPrompt, Message

_MAX_TEMPLATE_CHARS = 2**16

Parts = Annotated[list[ContentPart], Field(max_length=10_000, fail_fast=True)]


class ChatMessage(WireModel):
    """A turn of the conversation. It may come from another server; fields beside its content that only that server
    knows are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    tool_calls: Annotated[list[AnyToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    refusal: str | None = Field(None, description="what an assistant message says that has no content")
    annotations: Accepted = None
    reasoning: Annotated[Any, Field(description="the thoughts before the answer, if it is a text")] = None
    reasoning_content: Annotated[Any, Field(description="goes before reasoning")] = None
    reasoning_details: Accepted = None
    cache_control: Accepted = None
    audio: NotDone = None
    function_call: NotDone = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content has to be set in a message of role {self.role}")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls may be set in assistant messages only")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id may be set in tool messages only")
        return self

    def template_form(self) -> Message:
        """Returns the message in the form that chat templates take."""
        message: Message = {"role": "system" if self.role == "developer" else self.role}
        said = self.content if self.content or self.refusal is None else self.refusal
        if said is not None or not self.tool_calls:
            message["content"] = template_content(said or "")
        if self.role == "assistant":
            message |= thought_form(self.reasoning_content or self.reasoning)
        if self.tool_calls:
            message["tool_calls"] = [call.template_form() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


def thought_form(thought: object) -> Message:
    """Returns the thoughts of an assistant's message under the names that clients and chat templates know."""
    return {"reasoning_content": thought, "reasoning": thought} if isinstance(thought, str) and thought else {}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]


class TemplateFields(WireModel):
    """The fields that say how to fill the model's chat template."""

    chat_template_kwargs: Annotated[dict[OptionName, Any], at_most(16)] | None = Field(
        None, description="variables of the model's chat template, e.g. enable_thinking"
    )
    chat_template: Annotated[str, Field(max_length=_MAX_TEMPLATE_CHARS)] | None = Field(
        None, description="a Jinja template in place of the model's, if the server allows it"
    )
    add_generation_prompt: bool | None = Field(None, description="begin the answer; else the last message goes on")
    continue_final_message: bool = Field(False, description="the answer goes on in the last message")

    @model_validator(mode="after")
    def _continues_or_begins(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        return self

    def chat_prompt(self, messages: list[Message], tools: Sequence[CallableTool], effort: object = None) -> ChatPrompt:
        """`effort`: how much the model shall think, if its template reads that."""
        begins = not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
        return ChatPrompt(
            messages,
            [tool.template_form() for tool in tools],
            template_kwargs=_effort_variables(effort) | (self.chat_template_kwargs or {}),
            add_generation_prompt=begins,
            continue_final_message=self.continue_final_message,
            template=self.chat_template,
        )

    def chat_and_media(
        self, messages: Messages, tools: Sequence[CallableTool] = (), effort: object = None
    ) -> tuple[ChatPrompt, list[MediaSource]]:
        """Returns the pipeline's prompt and its media. Raises InvalidRequestError."""
        prompt = self.chat_prompt([message.template_form() for message in messages], tools, effort)
        return prompt, media_of((message.content or "" for message in messages), "messages")


def _effort_variables(effort: object) -> dict[str, Any]:
    """Returns the variables of chat templates that say how much a model shall think."""
    if not isinstance(effort, str):
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def media_of(contents: Iterable[Content], field: str) -> list[MediaSource]:
    """Returns every item of the messages, in the order of the prompt. `field`: the client's name for the messages."""
    return [
        part.source(f"{field}[{index}].content[{number}].{part.type}")
        for index, content in enumerate(contents)
        for number, part in enumerate(() if isinstance(content, str) else content)
        if isinstance(part, MediaPart)
    ]
