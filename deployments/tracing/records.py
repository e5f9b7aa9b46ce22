"""What is noted of spans while requests are served. `deployments/tracing/otlp.py` makes messages of it later.

Spans of OpenTelemetry's SDK take some 20 us to begin and end, and several times that where the model has just used the
processor's caches. A record takes a few."""

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from opentelemetry.trace import SpanContext, TraceFlags

from raylens.deployments.request_context import RequestContext
from raylens.preprocess.schema import StageTime

Attribute = str | bool | int | float | Sequence[str]
NANOSECONDS = 10**9
_SAMPLED = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))


@dataclass(frozen=True, slots=True)
class SpanError:
    """An error within a span, as text: the error itself would keep alive what its frames hold. `happened_at`: wall time
    in nanoseconds."""

    happened_at: int
    attributes: dict[str, Attribute]

    @classmethod
    def of(cls, error: BaseException) -> "SpanError":
        kind = type(error)
        attributes: dict[str, Attribute] = {
            "exception.type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
            "exception.message": str(error),
            "exception.stacktrace": "".join(traceback.format_exception(error)),
        }
        return cls(time.time_ns(), attributes)


@dataclass(slots=True)
class OpenSpan:
    """A span that is not over. `context`: what its children get. Where `is_recorded` is False it stands for no span,
    and is only handed on. `parent_id`: 16 hex digits, or nothing. `failure`: why it failed. `started_at`: wall time in
    nanoseconds. `times`: the stage times that become children of this span."""

    context: RequestContext
    is_recorded: bool = False
    name: str = ""
    parent_id: str = ""
    is_server: bool = False
    attributes: dict[str, Attribute] = field(default_factory=dict)
    links: list[RequestContext] = field(default_factory=list)
    errors: list[SpanError] = field(default_factory=list)
    failure: str | None = None
    started_at: int = field(default_factory=time.time_ns)
    times: list[StageTime] = field(default_factory=list)

    def describe(self, attributes: Mapping[str, Attribute]) -> None:
        self.attributes.update(attributes)

    def link(self, other: RequestContext) -> None:
        """Says that the work of another span is this one's, too."""
        if other.is_sampled:
            self.links.append(other)

    def note_error(self, error: BaseException, *, is_failure: bool = True) -> None:
        """`is_failure`: whether the span failed, or only tells of a client's mistake."""
        if not self.is_recorded:
            return
        self.errors.append(SpanError.of(error))
        if is_failure:
            self.failure = str(error)


@dataclass(slots=True)
class EndedSpan:
    """A span that is over since `ended_at`, wall time in nanoseconds."""

    context: ClassVar[SpanContext] = _SAMPLED
    """Of any span that is collected: OpenTelemetry's queue asks for no more."""
    span: OpenSpan
    ended_at: int


@dataclass(slots=True)
class StageSpans:
    """A span of each of the `times`, a child of the `parent`'s."""

    context: ClassVar[SpanContext] = _SAMPLED
    parent: RequestContext
    times: Sequence[StageTime]
    attributes: Mapping[str, Attribute]


SpanRecord: TypeAlias = EndedSpan | StageSpans
