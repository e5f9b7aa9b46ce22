"""`raylens trace`: draws a request's waterfall, a line for each stage, as terminal text or as SVG."""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TextIO

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from raylens.deployments.api.wire import StageTimings
from raylens.deployments.metrics.waterfall_stages import WATERFALL

HELP = """\
Show a request's stage times: a line for each stage, with a bar on the request's time axis.

  raylens serve --log-format json 2>&1 | raylens trace      each request as it ends
  raylens trace server.log --id 3f1c9a                      the header X-Request-Id of the answer, or the answer's id
  raylens trace < answer.json                               an answer to a request with "stage_timings": true
  raylens trace answer.json --svg waterfall.svg             also as an SVG drawing

The input is a log of JSON lines, an answer, or a stream of events. Requests without stage times are skipped. The faint
bar is decoding as a whole. See docs/tracing.md.
"""
_LEAST_BAR = 10  # width of the bars' column, in characters
_FULL, _FAINT = "█", "░"
_DECODE = "decode"  # from the first to the last token; drawn faintly, because it includes `first_decode`
_ENCODING = WATERFALL[: WATERFALL.index("transfer_embeddings")]
_TO_FIRST_TOKEN = ("transfer_embeddings", "llm_queue", "prefill")
_ROW, _TOP, _MARGIN, _CHAR = 22, 60, 16, 7.3
"""SVG layout in pixels: row height, top of the first row, margin, character width."""
_WIDTH = 960
_GREY = 'fill="#6b7280"'
_COLOURS = {  # by deployment; those of Generate are blue
    **dict.fromkeys(("admission_queue", "media_fetch"), "#6b7280"),
    **dict.fromkeys(("processor_queue", "media_decode", "processor", "render"), "#d97706"),
    **dict.fromkeys(("transfer_pixels", "encode_queue", "encode"), "#7c3aed"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument
    add("file", type=Path, nargs="?", metavar="FILE", help="the log or the answer (default: standard input)")
    add("--id", help="draw only the request with this id")
    add("--svg", type=Path, metavar="FILE", help="write a drawing of the last request to FILE, too")


def run(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Raises RuntimeError if there is nothing to draw, or if a file cannot be read or written."""
    found = False
    try:
        with nullcontext(sys.stdin) if args.file is None else args.file.open(errors="replace") as text:
            for document in _documents(text):
                request = timed_request(document)
                if request is None or args.id not in (None, request.request_id, request.response_id):
                    continue
                say(("\n" if found else "") + as_text(request, shutil.get_terminal_size().columns))
                found = True
                if args.svg is not None:
                    args.svg.write_text(as_svg(request))
    except OSError as error:
        raise RuntimeError(f"{error.filename}: {error.strerror}") from error
    if not found:
        which = "no request" if args.id is None else f"no request {args.id}"
        raise RuntimeError(f"{which} with stage times in {args.file or 'standard input'}")
    return 0


def _documents(text: TextIO) -> Iterator[str]:
    """Yields each line, or a multi-line answer as a whole."""
    for line in text:
        yield line + text.read() if line.strip() == "{" else line


class TimedRequest(BaseModel):
    """A line of the JSON log, an answer, or a stream's event. Only the log has the fields from `request_id` on."""

    stage_timings: StageTimings
    response_id: str = Field("", validation_alias=AliasChoices("response_id", "id"))
    model: str = ""
    request_id: str = ""
    method: str = ""
    path: str = ""
    status: int | None = None
    code: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Bar:
    """`start`: seconds after the request's arrival."""

    stage: str
    start: float
    seconds: float


def timed_request(text: str) -> TimedRequest | None:
    """Parses a JSON object or a server-sent event; None if it has no stage times."""
    try:
        return TimedRequest.model_validate_json(text.removeprefix("data: "))
    except ValidationError:
        return None


def bars(timings: StageTimings) -> list[Bar]:
    """Places the stages on the request's time axis by their durations: the stages up to `encode` follow each other from
    the arrival, with `render` in parallel; the other stages end with the first token."""
    seconds, first = timings.seconds, timings.time_to_first_token
    starts, moment = {"first_decode": first}, 0.0
    for stage in _ENCODING:
        starts[stage] = moment
        if stage != "render":
            moment += seconds.get(stage, 0.0)
    moment = first
    for stage in reversed(_TO_FIRST_TOKEN):
        moment -= seconds.get(stage, 0.0)
        starts[stage] = max(0.0, moment)
    drawn = [Bar(stage, starts[stage], seconds[stage]) for stage in WATERFALL if stage in seconds]
    return drawn + ([Bar(_DECODE, first, timings.total - first)] if timings.total > first else [])


def as_text(request: TimedRequest, width: int) -> str:
    """Returns lines of at most `width` characters, unless too narrow for bars."""
    drawn, end = bars(request.stage_timings), _end(request)
    times = [_milliseconds(bar.seconds) for bar in drawn]
    left, right = _longest([bar.stage for bar in drawn]), _longest(times)
    bar_width = max(_LEAST_BAR, width - left - right - 4)
    rows = zip(drawn, times, strict=True)
    lines = [f"{bar.stage:{left}}  {_line(bar, end, bar_width)}  {time:>{right}}" for bar, time in rows]
    return "\n".join([_title(request), _facts(request), "", *lines])


def as_svg(request: TimedRequest) -> str:
    """Returns an SVG document: a bar for each stage, in its deployment's colour, on one axis of milliseconds."""
    rows, end = bars(request.stage_timings), _end(request)
    left = _MARGIN + _CHAR * max(12, _longest([bar.stage for bar in rows])) + 8
    right, bottom = _WIDTH - _MARGIN - _CHAR * 10, _TOP + _ROW * len(rows)
    height = bottom + 16 + _MARGIN

    def x(moment: float) -> float:
        return left + (right - left) * moment / end

    drawn = [_text(_MARGIN, 26, _title(request), 'font-weight="bold"'), _text(_MARGIN, 44, _facts(request), _GREY)]
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = x(fraction * end)
        drawn.append(f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="#e5e7eb"/>')
        drawn.append(_text(at, bottom + 16, _milliseconds(fraction * end), f'{_GREY} text-anchor="middle"'))
    for row, bar in enumerate(rows):
        y, start, stop = _TOP + _ROW * row, x(bar.start), x(bar.start + bar.seconds)
        drawn.append(_text(_MARGIN, y + 15, bar.stage))
        drawn.append(
            f'<rect x="{start:.1f}" y="{y + 4}" width="{max(1.5, stop - start):.1f}" height="{_ROW - 8}" rx="2"'
            f' fill="{_COLOURS.get(bar.stage, "#2563eb")}"'
            f' fill-opacity="{0.3 if bar.stage == _DECODE else 1}"><title>{bar.stage}</title></rect>'
        )
        drawn.append(_text(max(stop, start + 1.5) + 5, y + 15, _milliseconds(bar.seconds), 'fill="#374151"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        ' font-family="ui-monospace, monospace" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(drawn)}</svg>\n'
    )


def _end(request: TimedRequest) -> float:
    ends = [bar.start + bar.seconds for bar in bars(request.stage_timings)]
    return max([request.seconds, request.stage_timings.total, *ends, 1e-6])


def _title(request: TimedRequest) -> str:
    what = f"{request.method} {request.path} {request.status or ''} {request.code}".strip()
    return "  ".join(filter(None, [what, request.request_id, request.response_id, request.model]))


def _facts(request: TimedRequest) -> str:
    timings = request.stage_timings
    hits = timings.embedding_cache_hits + timings.processor_cache_hits
    first, whole = _milliseconds(timings.time_to_first_token), _milliseconds(request.seconds or timings.total)
    return f"first token after {first}, all after {whole}" + (f", {hits} items from the caches" if hits else "")


def _line(bar: Bar, end: float, width: int) -> str:
    """Returns a line of `width` characters with a bar of at least one."""
    first = min(width - 1, round(bar.start * width / end))
    length = max(1, min(width - first, round(bar.seconds * width / end)))
    return " " * first + (_FAINT if bar.stage == _DECODE else _FULL) * length + " " * (width - first - length)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(text)}</text>'
