"""How many tokens of prompts a step computes beside the sequences that decode, so that no stream halts for long.

The engine tells how long its steps took. A step that only decodes is the measure: a step with prompts may take so many
times as long. Steps with prompts tell the cost of a prompt's token.

Steps take longer, sometimes several times as long, when the system gives their cores to somebody else. So what a token
costs is the median of the latest steps with as many threads. Decoding is measured less often, and short steps suffer
most. Of their times one of the shortest counts. The very shortest do not, because now and then a step is tried with
another number of threads.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from statistics import median

_NUM_DECODE_STEPS = 24
_MANY_MORE = 4
"""With so many times as many sequences as in any of these steps, decoding is measured again."""
_NUM_MIXED_STEPS = 9
_PERIOD = 20
"""After so many steps in a row with prompts in them, one only decodes, so that the measure stays up to date. This takes
less than a fiftieth of the time."""
_FIRST_TOKENS = 32
"""A step with prompts may always have so many if its time allows, and at most that many when no such step has been
measured yet."""
_MAX_GROWTH = 2
"""How many times as many tokens a step with prompts may have as the one before: few tokens cost less each than many."""
_LEAST_TOKENS = 16
"""A step with prompts takes at least so many, so that prompts get on even if decoding alone takes all the time."""
_ROWS = 8
"""A step has a multiple of so many tokens: the kernels compute so many rows at once."""


class StepBudget:
    """The number of prompt tokens in a step in which sequences decode."""

    def __init__(
        self,
        *,
        max_decode_slowdown: float | None = None,
        num_threads: Callable[[], int] = lambda: 1,
    ) -> None:
        """`max_decode_slowdown`: how many times as long as a decoding step a step with prompts may take.
        None: the number of tokens has no bound. `num_threads` returns how many threads the next step with prompts
        has."""
        self._max_decode_slowdown = max_decode_slowdown
        self._next_num_threads = num_threads
        self._num_threads = 1
        self._measured_num_threads = 1
        self._decode_steps: deque[tuple[int, float]] = deque(maxlen=_NUM_DECODE_STEPS)
        """Of the latest steps that only decoded: how many sequences, and how long it took, in seconds."""
        self._seconds_per_token: dict[int, deque[float]] = defaultdict(partial(deque, maxlen=_NUM_MIXED_STEPS))
        """By the number of threads."""
        self._num_steps_with_prompts = 0
        self._num_last_tokens = 0

    def prompt_tokens(self, num_decodes: int, room: int, num_tenants: int = 1) -> int:
        """Returns how many tokens of prompts, up to `room`, the next step may compute beside `num_decodes` sequences
        that decode. It is 0 where the step has to show how long decoding takes.

        Of several tenants, each one's prompts may slow the others down by their part of the time: a step takes at most
        `num_tenants` times as long as one that only decodes."""
        if num_decodes == 0 or self._max_decode_slowdown is None:
            return room
        if self._is_decoding_unknown(num_decodes) or self._num_steps_with_prompts >= _PERIOD:
            return 0
        self._num_threads = self._next_num_threads()
        total = num_decodes + max(_LEAST_TOKENS, self._tokens_in_time(num_tenants))
        return min(room, total // _ROWS * _ROWS - num_decodes)

    def note(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Takes how long the last step took, and what it computed."""
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
        most = max(_FIRST_TOKENS, _MAX_GROWTH * self._num_last_tokens)
        each = self._each()
        if each is None:
            return _FIRST_TOKENS
        seconds = self._seconds_beside(self._decoding(), num_tenants)
        return most if seconds >= each * most else int(seconds / each)

    def _each(self) -> float | None:
        """Returns what a token of a prompt costs with the next step's threads, in seconds. Where no step has had so
        many, fewer threads are expected to take longer and more threads as long."""
        if own := self._seconds_per_token.get(self._num_threads):
            return median(own)
        if latest := self._seconds_per_token.get(self._measured_num_threads):
            return median(latest) * max(1.0, self._measured_num_threads / self._num_threads)
        return None

    def _seconds_beside(self, decode_seconds: float, num_tenants: int) -> float:
        """Returns how long prompts may take in a step whose decoding takes `decode_seconds`."""
        assert self._max_decode_slowdown is not None
        slowdown = self._max_decode_slowdown if num_tenants == 1 else min(self._max_decode_slowdown, num_tenants)
        return (slowdown - 1) * decode_seconds

    def _decoding(self) -> float:
        """Returns how long a step takes that only decodes, undisturbed."""
        times = sorted(seconds for _, seconds in self._decode_steps)
        return times[len(times) // 8]
