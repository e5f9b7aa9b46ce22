"""Functions that a model may call: their definitions, and the form of calls in messages."""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag, model_validator
from pydantic_core import from_json

from raylens.deployments.api.wire import Accepted, LeftOut, Name, WireModel

MAX_TOOLS = 128
_MAX_DEPTH = 64

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _json_object(text: str) -> str:
    """Checks the arguments of a call. Some servers send an empty text for a call without arguments."""
    text = text.strip() or "{}"
    try:
        # Unlike Python's `json`, it refuses lone surrogates, which no prompt can hold.
        value = from_json(text.encode(), allow_inf_nan=False)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object, as text")
    flat_enough(value)
    return text


JsonObject = Annotated[str, AfterValidator(_json_object)]


def flat_enough(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses deeply nested values, which would exceed the recursion limit of code that reads or writes them."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
        ]
    if level:
        raise ValueError(f"is nested deeper than {_MAX_DEPTH} levels, which is the limit")
    return value


class FunctionDefinition(WireModel):
    """`parameters`: a JSON schema of the arguments. `strict` is a hint: forced calls are always valid against it."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(flat_enough)] | None = None
    strict: bool | None = None


class Tool(WireModel):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Accepted = None

    def template_form(self) -> dict[str, Any]:
        """The form for chat templates."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True)}


class CustomDefinition(WireModel):
    """A function whose only argument is a text. `format`: the model is told of it, but the text need not follow it."""

    name: FunctionName
    description: str | None = None
    format: Any = None


class CustomTool(WireModel):
    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def function(self) -> FunctionDefinition:
        """The function that stands for the tool in prompts and answers."""
        told = [] if self.custom.description is None else [self.custom.description]
        match self.custom.format:
            case {"definition": str(definition)} | {"grammar": {"definition": str(definition)}}:
                told.append(f"The input follows this grammar:\n{definition}")
        return FunctionDefinition(name=self.custom.name, description="\n".join(told) or None, parameters=_TEXT_INPUT)

    def template_form(self) -> dict[str, Any]:
        return Tool(type="function", function=self.function).template_form()


_TEXT_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
CallableTool = Tool | CustomTool


class HostedTool(LeftOut):
    """A tool that its own server runs, such as `web_search`. The model does not hear of it."""


def kind_of_tool(value: object) -> str:
    """Returns the tag of a tool, or of the choice of one. Tags with a capital letter are no part of a field's name."""
    if isinstance(value, str):
        return "Mode"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"function": "Function", "custom": "Custom", "allowed_tools": "Allowed"}.get(str(kind), "Hosted")


AnyTool = Annotated[
    Annotated[Tool, Tag("Function")] | Annotated[CustomTool, Tag("Custom")] | Annotated[HostedTool, Tag("Hosted")],
    Discriminator(kind_of_tool),
]


@dataclass(frozen=True, slots=True)
class Selection:
    """`names`: of the functions that an answer may call; None: any. `is_forced`: it has to call one."""

    names: frozenset[str] | None = None
    is_forced: bool = False


class HostedChoice(HostedTool):
    @model_validator(mode="after")
    def _is_refused(self) -> Self:
        raise ValueError(f"this server runs no tool of type {self.type!r}")

    @property
    def choice(self) -> Selection:
        raise NotImplementedError


class NamedFunction(WireModel):
    name: FunctionName


class ForcedTool(WireModel):
    """One tool, which the answer has to call."""

    @property
    def tool_name(self) -> str:
        raise NotImplementedError

    @property
    def choice(self) -> Selection:
        return Selection(frozenset({self.tool_name}), is_forced=True)


class NamedTool(ForcedTool):
    type: Literal["function"]
    function: NamedFunction

    @property
    def tool_name(self) -> str:
        return self.function.name


class NamedCustomTool(ForcedTool):
    type: Literal["custom"]
    custom: NamedFunction

    @property
    def tool_name(self) -> str:
        return self.custom.name


FunctionT = TypeVar("FunctionT", bound=ForcedTool)
CustomT = TypeVar("CustomT", bound=ForcedTool)


class Allowed(WireModel, Generic[FunctionT, CustomT]):
    """The prompt has all tools, but the answer may call only these."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionT, Tag("Function")]
                | Annotated[CustomT, Tag("Custom")]
                | Annotated[HostedTool, Tag("Hosted")],
                Discriminator(kind_of_tool),
            ]
        ],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]

    @property
    def choice(self) -> Selection:
        names = frozenset(one.tool_name for one in self.tools if isinstance(one, ForcedTool))
        return Selection(names, is_forced=self.mode == "required")


class ChosenTools(Allowed[NamedTool, NamedCustomTool]):
    pass


class AllowedTools(WireModel):
    type: Literal["allowed_tools"]
    allowed_tools: ChosenTools

    @property
    def choice(self) -> Selection:
        return self.allowed_tools.choice


ToolMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ToolMode, Tag("Mode")]
    | Annotated[NamedTool, Tag("Function")]
    | Annotated[NamedCustomTool, Tag("Custom")]
    | Annotated[AllowedTools, Tag("Allowed")]
    | Annotated[HostedChoice, Tag("Hosted")],
    Discriminator(kind_of_tool),
]


def call_form(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns a call in the form for chat templates, which write the arguments as JSON themselves."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class FunctionCall(WireModel):
    """`arguments`: a JSON object, as text."""

    name: FunctionName
    arguments: JsonObject


class ToolCall(WireModel):
    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall

    def template_form(self) -> dict[str, Any]:
        return call_form(self.id, self.function.name, from_json(self.function.arguments))


class CustomCall(WireModel):
    name: FunctionName
    input: str


class CustomToolCall(WireModel):
    id: Name
    type: Literal["custom"]
    custom: CustomCall

    def template_form(self) -> dict[str, Any]:
        return call_form(self.id, self.custom.name, {"input": self.custom.input})


AnyToolCall = Annotated[
    Annotated[ToolCall, Tag("Function")] | Annotated[CustomToolCall, Tag("Custom")],
    Discriminator(lambda value: "Custom" if kind_of_tool(value) == "Custom" else "Function"),
]


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """`tools`: the tools that the model sees, in the form of chat completions. `allowed`: those that an answer may
    call. `is_forced`: it must call one. `is_single`: the answer makes at most one call."""

    tools: list[CallableTool]
    allowed: list[CallableTool]
    is_forced: bool
    is_single: bool

    @property
    def custom(self) -> frozenset[str]:
        """The names of the tools that take a text."""
        return frozenset(tool.function.name for tool in self.tools if isinstance(tool, CustomTool))


class ToolFields(WireModel):
    """The tools of a request, and whether the answer must call one."""

    parallel_tool_calls: bool | None = None
    _offered: OfferedTools = PrivateAttr()

    @property
    def offered(self) -> OfferedTools:
        return self._offered

    @property
    def wants_single_call(self) -> bool:
        return self.parallel_tool_calls is False

    def tools_and_choice(self) -> tuple[list[CallableTool], ToolMode | Selection]:
        """Reads the tools and the choice among them from this API's own fields."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _chooses_among_tools(self) -> Self:
        tools, chosen = self.tools_and_choice()
        names = [tool.function.name for tool in tools]
        choice = chosen if isinstance(chosen, Selection) else Selection(is_forced=chosen == "required")
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have the same name")
        if choice.names and not names:
            raise ValueError("tool_choice: there are no tools to choose from")
        if choice.names is not None and not choice.names <= {*names}:
            raise ValueError("tool_choice names a function that is not among the tools")
        offered = [] if chosen == "none" else tools
        allowed = [tool for tool in offered if choice.names is None or tool.function.name in choice.names]
        if choice.is_forced and not allowed:
            raise ValueError("tool_choice: there are no tools to choose from")
        self._offered = OfferedTools(offered, allowed, choice.is_forced, is_single=self.wants_single_call)
        return self
