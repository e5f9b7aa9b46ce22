"""Simulated replicas of Preprocess, Encode and Generate, with the real schedulers and the real choice of a replica."""

import random
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Generic, TypeVar

from raylens.deployments.routing.replica_choice import Load, least_loaded, two_choices
from raylens.encoder.scheduler import EncoderScheduler
from raylens.encoder.schema import EncodeRequest, Segment
from raylens.llm.block_manager import BlockManager
from raylens.llm.scheduler import Scheduler
from raylens.llm.sequence import FinishReason
from raylens.llm.sequence import Sequence as TokenSequence
from raylens.llm.step_budget import StepBudget
from raylens.planning.answer import Answer, TokenRelay
from raylens.planning.cores import Machine, Process, event_loop
from raylens.planning.costs import EncodeCosts, GenerateCosts, ModelSizes, PreprocessCosts
from raylens.planning.load import Picture
from raylens.planning.virtual_time import Action, Begin, Clock, start, until

_BLOCK_SIZE = sys.maxsize
"""A block fits any sequence, so the KV cache has room for all running sequences."""


class Replica:
    """`loop`: takes calls and passes them on. `num_ongoing`: of calls."""

    def __init__(self, machine: Machine) -> None:
        self.loop = event_loop(machine)
        self.num_ongoing = 0


ReplicaT = TypeVar("ReplicaT", bound=Replica)


class Router(Generic[ReplicaT]):
    """Chooses the less loaded of two random replicas with fewer than `limit` calls."""

    def __init__(self, replicas: Sequence[ReplicaT], draw: random.Random, limit: int = sys.maxsize) -> None:
        self._replicas = {str(number): replica for number, replica in enumerate(replicas)}
        self._draw = draw
        self._limit = limit
        self._waiting: deque[Action] = deque()

    async def call(self, work: Callable[[ReplicaT], Coroutine[Begin, None, None]]) -> None:
        """Runs `work` on a replica. Waits behind earlier calls while all replicas are full."""
        while (replica := self._choose()) is None:
            await until(self._waiting.append)
        replica.num_ongoing += 1
        await work(replica)
        replica.num_ongoing -= 1
        if self._waiting:
            self._waiting.popleft()()

    def _choose(self) -> ReplicaT | None:
        numbers = {name: replica.num_ongoing for name, replica in self._replicas.items()}
        loads = {name: Load(number, is_full=number >= self._limit) for name, number in numbers.items()}
        best = two_choices(self._draw.sample(list(loads), len(loads)), loads)[0]
        chosen = least_loaded({name: loads[name] for name in best})
        return None if chosen is None else self._replicas[chosen]


class PreprocessReplica(Replica):
    """Decodes pictures and runs the processor on them, one after the other."""

    def __init__(self, machine: Machine, costs: PreprocessCosts) -> None:
        super().__init__(machine)
        self._costs = costs
        self.worker = Process(machine, costs.niceness)

    async def work(self, picture: Picture, on_path_share: float) -> None:
        await self.loop.pass_through(self._costs.work.of_picture(picture), on_path_share)
        await self.worker.compute(self._costs.of_item(picture))


class EncodeReplica(Replica):
    """Encodes pictures in the batches of `encoder/scheduler.py`."""

    def __init__(self, machine: Machine, costs: EncodeCosts, model: ModelSizes) -> None:
        super().__init__(machine)
        self._costs = costs
        self._model = model
        self._scheduler = EncoderScheduler(costs.max_batch_patches)
        self._actions: dict[str, Action] = {}
        self._num_added = 0
        self._is_running = False
        self.worker = Process(machine, costs.niceness)

    async def work(self, picture: Picture, on_path_share: float) -> None:
        await self.loop.pass_through(self._costs.work.of_picture(picture), on_path_share)
        await until(partial(self._add, self._model.patches(picture)))

    def _add(self, num_patches: int, then: Action) -> None:
        self._num_added += 1
        request = EncodeRequest(str(self._num_added), "image", [Segment({}, num_patches)], None, arrival_time=0.0)
        self._actions[request.request_id] = then
        self._scheduler.add(request)
        if not self._is_running:
            start(self._run())

    async def _run(self) -> None:
        self._is_running = True
        while batch := self._scheduler.schedule():
            num_patches = sum(segment.num_patches for segment in batch)
            await self.worker.compute(self._costs.seconds_per_batch + self._costs.seconds_per_patch * num_patches)
            for segment in batch:
                self._actions.pop(segment.request.request_id)()
        self._is_running = False


class GenerateReplica(Replica):
    """Computes answers in the steps of `llm/scheduler.py` and `llm/step_budget.py`. `engine`: the engine's thread. It
    shares the interpreter with `loop`."""

    def __init__(
        self, clock: Clock, machine: Machine, costs: GenerateCosts, pass_on: Callable[[list[Answer]], None]
    ) -> None:
        super().__init__(machine)
        self._clock = clock
        self._costs = costs
        self._blocks = BlockManager(costs.max_num_seqs, _BLOCK_SIZE)
        self.scheduler = Scheduler(
            self._blocks,
            costs.max_num_seqs,
            costs.max_num_batched_tokens,
            step_budget=StepBudget(max_decode_slowdown=costs.max_decode_slowdown),
            short_prompt_share=costs.short_prompt_share,
        )
        self._running: dict[TokenSequence, tuple[Answer, Action]] = {}
        self._is_running = False
        self.engine = Process(machine)
        self._relay = TokenRelay(self.loop, costs.work, pass_on)
        self.num_steps = 0
        self.step_seconds = 0.0

    async def work(self, answer: Answer, prompt_tokens: int, on_path_share: float) -> None:
        await self.loop.pass_through(self._costs.work.of_request(answer.arrival.pictures), on_path_share)
        max_num_tokens = prompt_tokens + answer.arrival.answer_tokens
        sequence = TokenSequence("", [0] * prompt_tokens, prompt_tokens, [], max_num_tokens)
        await until(partial(self._add, sequence, answer))

    def _add(self, sequence: TokenSequence, answer: Answer, then: Action) -> None:
        self._running[sequence] = answer, then
        self.scheduler.add(sequence)
        if not self._is_running:
            start(self._run())

    async def _run(self) -> None:
        self._is_running = True
        while chunks := self.scheduler.schedule():
            started, num_decodes = self._clock.now, self.scheduler.num_decodes
            await self._compute(num_decodes, sum([chunk.num_tokens for chunk in chunks]) - num_decodes)
            self.scheduler.note_step(chunks, num_decodes, self._clock.now - started)
            for chunk in chunks:
                self._blocks.note_computed(chunk.sequence, chunk.end)
            if tokens := [self._sampled(chunk.sequence) for chunk in chunks if chunk.samples]:
                self._relay.send(tokens)
            if self._costs.wait_per_step:
                await until(partial(self._clock.after, self._costs.wait_per_step))
        self._is_running = False

    async def _compute(self, num_decodes: int, num_prompt_tokens: int) -> None:
        seconds = self._costs.of_step(num_decodes, num_prompt_tokens)
        self.num_steps += 1
        self.step_seconds += seconds
        locked = min(seconds, self._costs.interpreter_seconds_per_step)
        if locked:
            await self.loop.compute(locked)
        await self.engine.compute(seconds - locked)

    def _sampled(self, sequence: TokenSequence) -> Answer:
        """Appends a token to the sequence, ends it after its last token, and returns its answer."""
        sequence.append_token(0)
        answer, then = self._running[sequence]
        if sequence.num_tokens == sequence.max_num_tokens:
            del self._running[sequence]
            self.scheduler.finish(sequence, FinishReason.LENGTH)
            then()
        return answer
