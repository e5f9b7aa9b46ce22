"""The base of all wire types (unknown fields, null), usage, timings and errors."""

from functools import cache
from typing import Annotated, Any, Self, TypeAlias, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

_MAX_FIELDS = 200
_MAX_NAME_CHARS = 64

Accepted = Annotated[Any, Field(description="accepted and unread: it cannot change the answer")]
"""A field that has a meaning on other servers only."""


def _asks_for_nothing(value: object) -> object:
    if value is None or value is False or value == [] or value == {}:
        return value
    raise ValueError("is not done by this server, leave it out")


NotDone = Annotated[Any, AfterValidator(_asks_for_nothing), Field(description="refused, unless it asks for nothing")]
"""A field that changes the answers of other servers and is not implemented here."""


class WireModel(BaseModel):
    """An object from a client. null stands for an absent optional field. `RequestBody` removes the unknown fields."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        # The server names each unknown field.
        if len(data) > _MAX_FIELDS:
            raise ValueError(f"{len(data)} fields, the limit is {_MAX_FIELDS}")
        if None not in data.values():
            return data
        not_nullable = _not_nullable(cls)
        return {name: value for name, value in data.items() if value is not None or name not in not_nullable}


class LeftOut(WireModel):
    """An object that the server takes out of a request as a whole, and names like an unknown field, by its `type`."""

    type: Annotated[str, Field(max_length=_MAX_NAME_CHARS)]


class RequestBody(WireModel):
    """The body of a request. Fields that the server does not know are ignored, at any depth."""

    strict_fields: bool = Field(False, description="refuse fields that the server does not know")
    _unknown_fields: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _takes_unknown_out(self) -> Self:
        found: list[_Place] = []
        _take_unknown(self, None, found)
        # Of a field in many elements of a list, the server names the first.
        firsts: dict[str, _Place] = {}
        for place in found:
            firsts.setdefault(_spelt(place, numbers=False), place)
        self._unknown_fields = [_spelt(place) for place in firsts.values()]
        return self

    @property
    def unknown_fields(self) -> list[str]:
        """The names of the ignored fields, such as `messages[0].content[1].colour`."""
        return self._unknown_fields


_Place: TypeAlias = "tuple[_Place | None, str | int]"
"""The place of a value in a body: its parent's place, and its name or index in the parent."""


def _take_unknown(value: object, place: "_Place | None", found: list[_Place]) -> None:
    """Removes the unknown fields of `value` and appends their places to `found`. A body may have tens of thousands of
    objects while all other requests wait, so places become text later."""
    if isinstance(value, LeftOut):
        found.append((place, value.type))
    elif isinstance(value, WireModel):
        if value.__pydantic_extra__:
            found += [(place, name[:_MAX_NAME_CHARS]) for name in value.__pydantic_extra__]
            value.__pydantic_extra__.clear()
        for name, wire_name in _fields_with_objects(type(value)):
            inner = value.__dict__[name]
            if inner is not None and not isinstance(inner, str):
                _take_unknown(inner, (place, wire_name), found)
    elif isinstance(value, list | dict):
        for key, inner in enumerate(value) if isinstance(value, list) else value.items():
            _take_unknown(inner, (place, key), found)


def _spelt(place: _Place, *, numbers: bool = True) -> str:
    before, key = place
    path = "" if before is None else _spelt(before, numbers=numbers)
    if isinstance(key, int):
        return f"{path}[{key}]" if numbers else f"{path}[]"
    return f"{path}.{key}" if path else key


@cache
def _not_nullable(model: type[WireModel]) -> frozenset[str]:
    """Returns the wire names of the optional fields that cannot be null."""
    fields = model.model_fields.items()
    optional = {field.alias or name: field.annotation for name, field in fields if not field.is_required()}
    return frozenset(
        name for name, kind in optional.items() if kind is not Any and type(None) not in (kind, *get_args(kind))
    )


@cache
def _fields_with_objects(model: type[WireModel]) -> tuple[tuple[str, str], ...]:
    """Returns the fields that may hold wire objects, each with its name on the wire."""
    fields = model.model_fields.items()
    return tuple((name, field.alias or name) for name, field in fields if _holds_objects(field.annotation))


def _holds_objects(annotation: object) -> bool:
    is_object = isinstance(annotation, type) and issubclass(annotation, WireModel)
    return is_object or any(map(_holds_objects, get_args(annotation)))


def at_most(limit: int) -> BeforeValidator:
    """Limits the entries of a dict. pydantic itself would validate every entry before it checks the limit."""

    def check(data: object) -> object:
        if isinstance(data, dict) and len(data) > limit:
            raise ValueError(f"{len(data)} entries, the limit is {limit}")
        return data

    return BeforeValidator(check)


Name = Annotated[str, Field(min_length=1, max_length=256)]
"""A client's name for something."""

OptionName = Annotated[str, Field(max_length=64)]

Metadata = Annotated[dict[OptionName, Annotated[str, Field(max_length=512)]], at_most(16)]
"""A client's own notes. They come back where OpenAI's API returns them."""


_T = TypeVar("_T")
OrAbsent = Annotated[_T | None, Field(exclude_if=lambda value: value is None)]
"""A field of an answer that is absent if unset. All other unset fields of answers are null, as OpenAI's are."""


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: OrAbsent[CompletionTokensDetails] = None


class PromptLogprob(BaseModel):
    """The log-probability of a token at a place of the prompt, in nats, and its rank there: 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""By place and token id: the prompt's own token and the likeliest ones. The first token of a prompt has none."""


class StageTimings(BaseModel):
    """The stage waterfall of one request, in seconds. A stage that was skipped is absent. Hits count items."""

    seconds: dict[str, float]
    time_to_first_token: float
    total: float
    processor_cache_hits: int
    embedding_cache_hits: int


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """OpenAI's form of an error, for every status above 399."""

    error: ErrorBody
