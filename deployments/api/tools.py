"""Functions that a model may call: their definitions, and the form of calls in messages."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator
from pydantic_core import from_json

from raylens.deployments.api.wire import Accepted, Name, WireModel

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
    _flat_enough(value)
    return text


JsonObject = Annotated[str, AfterValidator(_json_object)]


def _flat_enough(value: dict[str, Any]) -> dict[str, Any]:
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
    parameters: Annotated[dict[str, Any], AfterValidator(_flat_enough)] | None = None
    strict: bool | None = None


class Tool(WireModel):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Accepted = None

    def template_form(self) -> dict[str, Any]:
        """The form for chat templates."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True)}


class NamedFunction(WireModel):
    name: FunctionName


class NamedTool(WireModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChosenFunction(WireModel):  # the Responses API's NamedTool
    type: Literal["function"]
    name: FunctionName


class FunctionCall(WireModel):
    """`arguments`: a JSON object, as text."""

    name: FunctionName
    arguments: JsonObject


class ToolCall(WireModel):
    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall

    def template_form(self) -> dict[str, Any]:
        """The form for chat templates, which write the arguments as JSON themselves."""
        function = {"name": self.function.name, "arguments": from_json(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """`tools`: the tools that the model sees, in the form of chat completions. `forced`: the answer must call one of
    these; empty: the answer may be text. `is_single`: the answer makes at most one call."""

    tools: list[Tool]
    forced: list[Tool]
    is_single: bool


class ToolFields(WireModel):
    """The tools of a request, and whether the answer must call one."""

    parallel_tool_calls: bool | None = None
    _offered: OfferedTools = PrivateAttr()

    @property
    def offered(self) -> OfferedTools:
        return self._offered

    def tools_and_choice(self) -> tuple[list[Tool], ToolChoice | ChosenFunction | None]:
        """Reads the tools and the choice among them from this API's own fields."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _chooses_among_tools(self) -> Self:
        tools, choice = self.tools_and_choice()
        names = [tool.function.name for tool in tools]
        chosen = choice.function if isinstance(choice, NamedTool) else choice
        name = None if chosen is None or isinstance(chosen, str) else chosen.name
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have the same name")
        if (choice == "required" or name is not None) and not names:
            raise ValueError("tool_choice: there are no tools to choose from")
        if name is not None and name not in names:
            raise ValueError("tool_choice names a function that is not among the tools")
        offered = [] if choice == "none" else tools
        forced = offered if choice == "required" else [tool for tool in offered if tool.function.name == name]
        self._offered = OfferedTools(offered, forced, is_single=self.parallel_tool_calls is False)
        return self
