"""Functions that a model may call: how clients describe them, and how calls look in messages."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import from_json

from deployments.api.wire import Name, WireModel

MAX_TOOLS = 128
_MAX_DEPTH = 64

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _json_object(text: str) -> str:
    try:
        # Unlike Python's own, it refuses half surrogate pairs, which no prompt can hold.
        value = from_json(text.encode(), allow_inf_nan=False)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object, as text")
    _flat_enough(value)
    return text


def _flat_enough(value: dict[str, Any]) -> dict[str, Any]:
    """Deeper ones end the recursion of whoever writes or reads them."""
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
    """`parameters`: a JSON schema of the arguments. `strict` is a hint: forced calls always are valid against it."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_flat_enough)] | None = None
    strict: bool | None = None


class Tool(WireModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(WireModel):
    name: FunctionName


class NamedTool(WireModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(WireModel):
    """`arguments`: a JSON object, as text."""

    name: FunctionName
    arguments: Annotated[str, AfterValidator(_json_object)]


class ToolCall(WireModel):
    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall

    def template_form(self) -> dict[str, Any]:
        """As chat templates take it: they write the arguments as JSON themselves."""
        function = {"name": self.function.name, "arguments": from_json(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}
