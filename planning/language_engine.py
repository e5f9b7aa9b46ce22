"""A simulated replica of Generate: steps with the shape that `llm/scheduler.py` and `llm/step_budget.py` give them.

Sequences that decode go first. Prompts follow in chunks, as far as the step's budget goes: a share by arrival, the rest
to the prompts that lack the fewest. The cache of keys and values has room for all, and nothing is preempted.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from raylens.planning.cores import Process
from raylens.planning.costs import GenerateCosts
from raylens.planning.events import EventLoop
from raylens.planning.request_run import RequestRun

_LEAST_TOKENS = 16
_ROWS = 8
"""Of a step with prompts: the fewest tokens of prompts, and what the number of all tokens is a multiple of."""


def prompt_room(costs: GenerateCosts, num_decodes: int) -> int:
    """Returns how many tokens of prompts a step takes beside so many sequences that decode. The time of such a step is
    bounded by `max_decode_slowdown` times that of one which only decodes."""
    room = costs.max_num_batched_tokens - num_decodes
    if num_decodes == 0 or costs.max_decode_slowdown is None or costs.seconds_per_prompt_token == 0:
        return room
    seconds = (costs.max_decode_slowdown - 1) * costs.of_step(num_decodes, 0)
    total = num_decodes + max(_LEAST_TOKENS, int(seconds / costs.seconds_per_prompt_token))
    return max(0, min(room, total // _ROWS * _ROWS - num_decodes))


class LanguageEngine:
    """Computes requests in steps and hands on the tokens of each. `process` is the engine's thread, and `interpreter`
    is what it shares with the other thread of the replica."""

    def __init__(
        self,
        loop: EventLoop,
        process: Process,
        interpreter: Process,
        costs: GenerateCosts,
        hand_on: Callable[[list[RequestRun]], None],
    ) -> None:
        self._loop = loop
        self._process = process
        self._interpreter = interpreter
        self._costs = costs
        self._hand_on = hand_on
        self._waiting: deque[RequestRun] = deque()
        self._prompts: list[RequestRun] = []
        self._decoding: list[RequestRun] = []
        self._is_running = False
        self.num_steps = 0
        self.step_seconds = 0.0
        self.num_sequences = 0
        """The sum over all steps of those that decoded."""

    def add(self, request: RequestRun) -> None:
        self._waiting.append(request)
        if not self._is_running:
            self._is_running = True
            self._step()

    def _step(self) -> None:
        """Runs the next step, if there is anything to compute."""
        decoding, chunks = list(self._decoding), self._chunks()
        if not decoding and not chunks:
            self._is_running = False
            return
        self.num_steps += 1
        self.num_sequences += len(decoding)
        seconds = self._costs.of_step(len(decoding), sum(chunks.values()))
        self.step_seconds += seconds
        locked = min(seconds, self._costs.interpreter_seconds_per_step)
        end = partial(self._end, decoding, chunks)
        if locked:
            self._interpreter.submit(locked, partial(self._process.submit, seconds - locked, end))
        else:
            self._process.submit(seconds, end)

    def _end(self, decoding: list[RequestRun], chunks: dict[RequestRun, int]) -> None:
        for request, num_tokens in chunks.items():
            request.num_computed_tokens += num_tokens
        begun = [request for request in chunks if request.num_lacking == 0]
        sampled = decoding + begun
        for request in sampled:
            request.num_generated += 1
        going_on = [request for request in sampled if request.num_generated < request.arrival.answer_tokens]
        self._decoding = going_on
        if begun:
            self._prompts = [request for request in self._prompts if request.num_lacking > 0]
        if sampled:
            self._hand_on(sampled)
        if self._costs.wait_per_step:
            self._loop.after(self._costs.wait_per_step, self._step)
        else:
            self._step()

    def _chunks(self) -> dict[RequestRun, int]:
        """Returns how many tokens of which prompts the next step computes, and starts those that wait."""
        if not self._prompts and not self._waiting:
            return {}
        room = prompt_room(self._costs, len(self._decoding))
        places = self._costs.max_num_seqs - len(self._decoding) - len(self._prompts)
        prompts = self._prompts + [self._waiting[index] for index in range(min(places, len(self._waiting)))]
        chunks = share_out(prompts, room, self._costs.short_prompt_share)
        for request in prompts[len(self._prompts) :]:
            if request in chunks:
                self._waiting.remove(request)
                self._prompts.append(request)
        return chunks


def share_out(prompts: Sequence[RequestRun], room: int, short_prompt_share: float) -> dict[RequestRun, int]:
    """Divides a step's tokens among prompts, which are in the order of their arrival."""
    chunks: dict[RequestRun, int] = {}
    short = int(room * short_prompt_share) if len(prompts) > 1 else 0
    left = _take(prompts, room - short, chunks)
    _take(sorted(prompts, key=lambda request: request.num_lacking), left + short, chunks)
    return chunks


def _take(prompts: Sequence[RequestRun], room: int, chunks: dict[RequestRun, int]) -> int:
    for request in prompts:
        if room <= 0:
            break
        taken = min(room, request.num_lacking - chunks.get(request, 0))
        if taken > 0:
            chunks[request] = chunks.get(request, 0) + taken
            room -= taken
    return room
