"""Limits the prompt tokens of a step beside its decoding sequences, so that no stream stalls for long.

The limit for a step with prompts is a multiple of the duration of a decode-only step. Steps with prompts yield the cost
of a prompt token.

Steps take up to several times as long while other processes use their cores. The cost of a prompt token is therefore
the median over the latest steps with the same number of threads. Decode-only steps are fewer and shorter, so
interference distorts them more: a low quantile of their durations counts, not the minimum, because some steps try
another number of threads."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from statistics import median

_NUM_DECODE_STEPS = 24
_MANY_MORE = 4
"""Decoding is measured again when the number of sequences exceeds that of all measured steps by this factor."""
_NUM_MIXED_STEPS = 9
_PERIOD = 20
"""After so many consecutive steps with prompts, one step only decodes, to update the measurement."""
_FIRST_TOKENS = 32
"""The limit of a step with prompts before the first measurement. Later steps may grow to this number at once."""
_MAX_GROWTH = 2
"""The largest growth of prompt tokens between two steps: a token costs less in a small step than in a large one."""
_LEAST_TOKENS = 16
"""The fewest tokens of a step with prompts, so that prompts progress even if decoding alone takes all the time."""
_ROWS = 8
"""A step has a multiple of so many tokens, because the kernels compute so many rows at once."""


class StepBudget:
    """The number of prompt tokens in a step in which sequences decode."""

    def __init__(self, max_decode_slowdown: float | None = None, num_threads: Callable[[], int] = lambda: 1) -> None:
        """`max_decode_slowdown`: the limit relative to a decode-only step. None: prompt tokens are unlimited.
        `num_threads`: returns the number of threads of the next step with prompts."""
        self._max_decode_slowdown = max_decode_slowdown
        self._next_num_threads = num_threads
        self._num_threads = 1
        self._measured_num_threads = 1
        self._decode_steps: deque[tuple[int, float]] = deque(maxlen=_NUM_DECODE_STEPS)
        """Of the latest decode-only steps: the number of sequences and the seconds."""
        self._seconds_per_token: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=_NUM_MIXED_STEPS))
        """By the number of threads."""
        self._num_steps_with_prompts = 0
        self._num_last_tokens = 0

    def prompt_tokens(self, num_decodes: int, room: int, num_tenants: int = 1) -> int:
        """Returns the number of prompt tokens, up to `room`, for the next step beside `num_decodes` decoding sequences,
        or 0 if the step must measure decoding. With several tenants, a step takes at most `num_tenants` times as long
        as a decode-only step, so that each tenant's prompts slow the others down by no more than its share."""
        if num_decodes == 0 or self._max_decode_slowdown is None:
            return room
        if self._is_decoding_unknown(num_decodes) or self._num_steps_with_prompts >= _PERIOD:
            return 0
        self._num_threads = self._next_num_threads()
        total = num_decodes + max(_LEAST_TOKENS, self._tokens_in_time(num_tenants))
        return min(room, total // _ROWS * _ROWS - num_decodes)

    def note(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Records the duration and content of the last step."""
        if num_decodes == 0:
            return
        if num_prompt_tokens == 0:
            self._num_steps_with_prompts = 0
            if self._is_decoding_unknown(num_decodes):
                self._decode_steps.clear()
            self._decode_steps.append((num_decodes, seconds))
            return
        self._num_steps_with_prompts += 1
        self._num_last_tokens = num_prompt_tokens
        if self._decode_steps:
            each = (seconds - self._decoding()) / num_prompt_tokens
            self._seconds_per_token[self._num_threads].append(each)
            self._measured_num_threads = self._num_threads

    def _is_decoding_unknown(self, num_decodes: int) -> bool:
        return num_decodes >= _MANY_MORE * max((number for number, _ in self._decode_steps), default=0)

    def _tokens_in_time(self, num_tenants: int) -> int:
        assert self._max_decode_slowdown is not None
        each = self._each()
        if each is None:
            return _FIRST_TOKENS
        slowdown = self._max_decode_slowdown if num_tenants == 1 else min(self._max_decode_slowdown, num_tenants)
        seconds = (slowdown - 1) * self._decoding()
        most = max(_FIRST_TOKENS, _MAX_GROWTH * self._num_last_tokens)
        return most if seconds >= each * most else int(seconds / each)

    def _each(self) -> float | None:
        """Returns the seconds of a prompt token with the next step's threads. Without a measurement for this number of
        threads, fewer threads count as proportionally slower and more threads as equally fast."""
        if own := self._seconds_per_token.get(self._num_threads):
            return median(own)
        if latest := self._seconds_per_token.get(self._measured_num_threads):
            return median(latest) * max(1.0, self._measured_num_threads / self._num_threads)
        return None

    def _decoding(self) -> float:
        """Returns the undisturbed duration of a decode-only step, in seconds."""
        times = sorted(seconds for _, seconds in self._decode_steps)
        return times[len(times) // 8]
