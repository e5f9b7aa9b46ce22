"""One request's waterfall: a line for each stage that worked on it, as text for a terminal and as SVG."""

from collections.abc import Sequence
from html import escape

from raylens.deployments.api.traces import Trace, TraceSpan

_LEAST_BAR = 10
"""Characters of the narrowest bars."""
_BAR, _FAINT = "█", "░"
_WHOLES = ("item", "generate", "decode")
"""Stages drawn faintly, because other lines are parts of them."""
_ROW, _TOP, _MARGIN, _CHAR = 22, 76, 16, 7.3
"""Pixels of the drawing: the height of a line, where the lines begin, the space around them, a character's width."""
_WIDTH = 960
_GREY = 'fill="#6b7280"'
_COLOURS = {
    "Ingress": "#6b7280",
    "Shared": "#0d9488",
    "Preprocess": "#d97706",
    "Encode": "#7c3aed",
    "Generate": "#2563eb",
}
"""By the first part of the deployment's name."""


def as_text(trace: Trace, width: int) -> str:
    """Returns lines of at most `width` characters, if there is room for bars at all."""
    names, numbered = _names(trace)
    times = [_milliseconds(span.seconds) for span in trace.spans]
    ends = [", ".join(filter(None, [_deployment(span), span.detail])) for span in trace.spans]
    bar_width = max(_LEAST_BAR, width - _longest(names) - _longest(times) - _longest(ends) - 6)
    begin, end = _extent(trace)
    lines = [_title(trace), *_facts(trace), ""]
    for span, name, time, told in zip(trace.spans, names, times, ends, strict=True):
        bar = _bar(span, begin, end, bar_width)
        lines.append(f"{name:{_longest(names)}}  {bar}  {time:>{_longest(times)}}  {told}".rstrip())
    return "\n".join([*lines, *([""] if numbered else []), *numbered])


def as_svg(trace: Trace) -> str:
    """Returns an SVG document: a bar for each span, in its deployment's colour, on one axis of milliseconds."""
    begin, end = _extent(trace)
    names, numbered = _names(trace)
    left = _MARGIN + _CHAR * max(12, _longest(names)) + 8
    right = _WIDTH - _MARGIN - _CHAR * 10
    bottom = _TOP + _ROW * len(trace.spans)
    height = bottom + 16 * (len(numbered) + 1) + _MARGIN

    def x(moment: float) -> float:
        return left + (right - left) * (moment - begin) / (end - begin)

    drawn = [_text(_MARGIN, 26, _title(trace), 'font-weight="bold"')]
    drawn += [_text(_MARGIN, 44 + 16 * row, fact, _GREY) for row, fact in enumerate(_facts(trace))]
    drawn += [_text(_MARGIN, bottom + 32 + 16 * row, line, _GREY) for row, line in enumerate(numbered)]
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = x(begin + fraction * (end - begin))
        drawn.append(f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="#e5e7eb"/>')
        label = _milliseconds(fraction * (end - begin))
        drawn.append(_text(at, bottom + 16, label, f'{_GREY} text-anchor="middle"'))
    for row, (span, name) in enumerate(zip(trace.spans, names, strict=True)):
        y, start, stop = _TOP + _ROW * row, x(span.started_at), x(span.started_at + span.seconds)
        colour = _COLOURS.get(_deployment(span).partition("-")[0], "#111827")
        opacity = "0.3" if span.stage in _WHOLES else "1"
        told = ", ".join(filter(None, [name, _milliseconds(span.seconds), span.place, span.part, span.detail]))
        drawn.append(_text(_MARGIN, y + 15, name))
        drawn.append(
            f'<rect x="{start:.1f}" y="{y + 4}" width="{max(1.5, stop - start):.1f}" height="{_ROW - 8}" rx="2"'
            f' fill="{colour}" fill-opacity="{opacity}"><title>{escape(told)}</title></rect>'
        )
        drawn.append(_text(max(stop, start + 1.5) + 5, y + 15, _milliseconds(span.seconds), 'fill="#374151"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        ' font-family="ui-monospace, monospace" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(drawn)}</svg>\n'
    )


def _extent(trace: Trace) -> tuple[float, float]:
    """Returns the first and the last moment that is drawn. Clocks of several nodes may differ, so a span may be outside
    of its request."""
    begin = min([trace.started_at, *(span.started_at for span in trace.spans)])
    ends = [trace.started_at + trace.seconds, *(span.started_at + span.seconds for span in trace.spans)]
    return begin, max(max(ends), begin + 1e-6)


def _title(trace: Trace) -> str:
    how = f"{trace.status}" + (f" {trace.error}" if trace.error else "")
    return f"{trace.method} {trace.path}  {how}  {_milliseconds(trace.seconds)}"


def _facts(trace: Trace) -> list[str]:
    return [
        f"request {trace.request_id}  trace {trace.trace_id}",
        f"{trace.model}: {trace.prompt_tokens} tokens of prompt, {trace.completion_tokens} of answer",
    ]


def _bar(span: TraceSpan, begin: float, end: float, width: int) -> str:
    """A span that is too short for a character has one nevertheless."""
    scale = width / (end - begin)
    first = min(width - 1, round((span.started_at - begin) * scale))
    length = max(1, min(width - first, round(span.seconds * scale)))
    return " " * first + (_FAINT if span.stage in _WHOLES else _BAR) * length + " " * (width - first - length)


def _names(trace: Trace) -> tuple[list[str], list[str]]:
    """Returns the name of each line, and lines that say what the numbers in these names stand for, if there are
    several parts of the request to tell apart."""
    numbers = {
        part: number for number, part in enumerate(dict.fromkeys(span.part for span in trace.spans if span.part))
    }
    if len(numbers) < 2:
        return [span.stage for span in trace.spans], []
    names = [f"{span.stage} [{numbers[span.part]}]" if span.part else span.stage for span in trace.spans]
    return names, [f"[{number}] {part}" for part, number in numbers.items()]


def _deployment(span: TraceSpan) -> str:
    return span.place.partition("#")[0]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(text)}</text>'
