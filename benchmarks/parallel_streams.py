"""Concurrent streams, and their pieces while all of them ran."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.streaming_client import Content, Sending, Stream, events_of, run_streams, text_of

Mark = dict[str, float]


@dataclass(frozen=True, slots=True)
class ParallelAnswers:
    """The pieces received while all streams ran: from `begin`, the first text of the last stream to start, to `end`,
    the last text of the first stream to finish. `seconds`: this duration. `gaps`: seconds between pieces of text of the
    same stream; data received at once is one piece. `num_tokens`: all streams' tokens of this duration, by their share
    of the text."""

    begin: Mark
    end: Mark
    seconds: float
    gaps: list[float]
    num_pieces: int
    num_tokens: float


class Marks:
    """Calls a function when the last stream begins, and when the first stream ends."""

    def __init__(self, num_streams: int, at_mark: Callable[[], Mark]) -> None:
        self._num_streams = num_streams
        self._at_mark = at_mark
        self._begun: set[int] = set()
        self.begin: tuple[float, Mark] | None = None
        self.end: tuple[float, Mark] | None = None

    def on_data(self, stream: Stream) -> None:
        moment, data = stream.received[-1]
        if b"data: {" in data:
            self._begun.add(id(stream))
        if self.begin is None and len(self._begun) == self._num_streams:
            self.begin = moment, self._at_mark()
        if self.end is None and b'"finish_reason":"' in data:
            self.end = moment, self._at_mark()


def stream_together(
    url: str, model: str, contents: Sequence[Content], num_tokens: int, at_mark: Callable[[], Mark]
) -> ParallelAnswers:
    """Streams greedy answers of exactly `num_tokens` tokens concurrently. Calls `at_mark` at the begin and at the end
    of the time in which all of them run. Raises RuntimeError if there is no such time, or for a wrong answer."""
    marks = Marks(len(contents), at_mark)
    sendings = [Sending.of(0.0, model, content, num_tokens) for content in contents]
    streams = run_streams(url, sendings, marks.on_data)
    if marks.begin is None or marks.end is None or marks.begin[0] >= marks.end[0]:
        raise RuntimeError(f"{len(streams)} streams never ran all at once: ask for more tokens")
    (begin_time, begin), (end_time, end) = marks.begin, marks.end
    gaps, num_pieces, tokens = list[float](), 0, 0.0
    for stream in streams:
        pieces = list(_pieces(stream, num_tokens))
        within = [(moment, length) for moment, length in pieces if begin_time <= moment <= end_time]
        gaps += [after[0] - before[0] for before, after in itertools.pairwise(within)]
        num_pieces += len(within)
        tokens += num_tokens * sum(length for _, length in within) / sum(length for _, length in pieces)
    return ParallelAnswers(begin, end, end_time - begin_time, gaps, num_pieces, tokens)


def _pieces(stream: Stream, num_tokens: int) -> Iterator[tuple[float, int]]:
    """Yields the time of each piece of text and its length in characters."""
    usage = None
    for moment, events in events_of(stream.received):
        length = len(text_of(events))
        usage = next((event["usage"] for event in events if event.get("usage")), usage)
        if length:
            yield moment, length
    if usage is None or usage["completion_tokens"] != num_tokens:
        raise RuntimeError(f"a stream ended with {usage}, not with {num_tokens} tokens")
