"""The Responses API's items: turns of the conversation, tool calls and their results."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from raylens.deployments.api.content import Content, InputContent, template_content
from raylens.deployments.api.messages import thought_form
from raylens.deployments.api.tools import (
    CustomCall,
    CustomDefinition,
    CustomTool,
    CustomToolCall,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    HostedTool,
    JsonObject,
    Tool,
    ToolCall,
    kind_of_tool,
)
from raylens.deployments.api.wire import Accepted, Name, NotDone, WireModel
from raylens.preprocess.schema import Message


class InputItem(WireModel):
    """An item of the conversation. A server adds `id`, `status` and `caller` to its items; they are ignored when the
    item comes back."""

    id: Accepted = None
    status: Accepted = None
    caller: Accepted = None


class InputMessage(InputItem):
    """A turn of the conversation, as a client writes it or as an answer's output holds it."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent
    phase: Accepted = None


class CalledFunction(InputItem):
    """A tool call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: JsonObject
    namespace: NotDone = None


class FunctionOutput(InputItem):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: InputContent
    name: Accepted = None
    namespace: Accepted = None


class CustomCalled(InputItem):
    """A call of a custom tool that an earlier answer made."""

    type: Literal["custom_tool_call"]
    call_id: Name
    name: FunctionName
    input: str
    namespace: NotDone = None


class CustomOutput(InputItem):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: Name
    output: InputContent


class ReasoningItem(InputItem):
    """The thoughts before the message or tool call that follows. Encrypted ones are of another server and ignored."""

    type: Literal["reasoning"]
    summary: Accepted = None
    content: Annotated[Any, Field(description="its texts are the thoughts")] = None
    encrypted_content: Accepted = None

    @property
    def text(self) -> str:
        parts = self.content if isinstance(self.content, list) else []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))


AnyItem = InputMessage | CalledFunction | FunctionOutput | CustomCalled | CustomOutput | ReasoningItem


def _kind(value: object) -> str | None:
    """Returns the kind of an item, as JSON or parsed. A message may leave its type out."""
    kind = (value.get("type") or "message") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CalledFunction, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[CustomCalled, Tag("custom_tool_call")]
    | Annotated[CustomOutput, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def as_messages(items: Sequence[AnyItem]) -> list[Message]:
    """Returns the messages for chat templates. Thoughts, text and tool calls of the assistant in a row become one
    message."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, InputMessage):
            role = "system" if item.role == "developer" else item.role
            content = template_content(item.content)
            if role == "assistant" and messages and "content" not in messages[-1]:
                messages[-1]["content"] = content
            else:
                messages.append({"role": role, "content": content})
        elif isinstance(item, FunctionOutput | CustomOutput):
            output = template_content(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif isinstance(item, CalledFunction | CustomCalled):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(_call(item).template_form())
        elif thought := thought_form(item.text):
            messages.append({"role": "assistant", **thought})
    for message in messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _call(item: CalledFunction | CustomCalled) -> ToolCall | CustomToolCall:
    if isinstance(item, CustomCalled):
        return CustomToolCall(id=item.call_id, type="custom", custom=CustomCall(name=item.name, input=item.input))
    return ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))


def said_in(item: AnyItem) -> Content:
    """Returns the content of the item."""
    if isinstance(item, InputMessage):
        return item.content
    return item.output if isinstance(item, FunctionOutput | CustomOutput) else ""


class FunctionTool(FunctionDefinition):
    """A tool in the Responses API. The fields under `function` in a chat completion stand beside `type` here."""

    type: Literal["function"]
    allowed_callers: Accepted = None
    output_schema: Accepted = None
    defer_loading: NotDone = None

    def as_tool(self) -> Tool:
        function = FunctionDefinition(name=self.name, description=self.description, parameters=self.parameters)
        return Tool(type="function", function=function)


class CustomToolItem(CustomDefinition):
    """A custom tool in the Responses API."""

    type: Literal["custom"]
    defer_loading: NotDone = None

    def as_tool(self) -> CustomTool:
        custom = CustomDefinition(name=self.name, description=self.description, format=self.format)
        return CustomTool(type="custom", custom=custom)


AnyToolItem = Annotated[
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomToolItem, Tag("Custom")]
    | Annotated[HostedTool, Tag("Hosted")],
    Discriminator(kind_of_tool),
]
