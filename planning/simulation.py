"""Simulates the pipeline in virtual time: requests pass through Ingress, Shared, Preprocess, Encode and Generate.

Each process takes its measured CPU time. docs/planning.md lists the simplifications."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from raylens.planning.answer import Answer, TokenRelay
from raylens.planning.cores import Machine, Process, event_loop
from raylens.planning.costs import Costs
from raylens.planning.load import Arrival, Picture
from raylens.planning.stages import EncodeReplica, GenerateReplica, PreprocessReplica, Router
from raylens.planning.virtual_time import Clock, start, together, until

STAGES = ("ingress", "shared", "preprocess", "encode", "generate")
WHOLE = (0.0, 1.0)
_EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas of each stage; a stage missing in `replicas` has one.

    `cores`: of the machine that all processes share; None: each process has its own core. `has_client`: the load's
    client is on that machine, too. `background_cores`: used by other programs, besides the idle server."""

    replicas: Mapping[str, int] = field(default_factory=dict)
    cores: int | None = None
    has_client: bool = False
    background_cores: float = 0.0

    def number(self, stage: str) -> int:
        return self.replicas.get(stage, 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a simulated load, times in seconds. `utilisation`: per stage, the share of the time in which a
    replica's busiest thread computes. `mean_batch`: decoding sequences per Generate step."""

    answers: Sequence[Answer] = field(compare=False, repr=False)
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float | None
    tpot_p95: float | None
    mean_latency: float
    utilisation: dict[str, float]
    cores_busy: float
    mean_batch: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the percentile, with linear interpolation."""
    return float(np.percentile(values, percent))


class _FrontDoor:
    """A replica of Ingress with its proxy."""

    def __init__(self, pipeline: "Pipeline", machine: Machine) -> None:
        costs = pipeline.costs
        self.proxy, self.ingress = event_loop(machine), event_loop(machine)
        proxy_relay = TokenRelay(self.proxy, costs.proxy.work, pipeline.to_client)
        self.relay = TokenRelay(self.ingress, costs.ingress.work, proxy_relay.send)


class Pipeline:
    """All processes, and a request's path through them."""

    def __init__(self, costs: Costs, fleet: Fleet, seed: int) -> None:
        self.costs = costs
        self.clock = Clock()
        self._draw = random.Random(seed)
        self._machine = machine = Machine(self.clock, fleet.cores, costs.background_cores + fleet.background_cores)
        self._client = Process(machine) if fleet.has_client else None
        client_relay = TokenRelay(self._client, costs.client, self._deliver) if self._client else None
        self.to_client = client_relay.send if client_relay else self._deliver
        self._beside = Process(machine)
        self._doors = [_FrontDoor(self, machine) for _ in range(fleet.number("ingress"))]
        self._shards = [event_loop(machine) for _ in range(fleet.number("shared"))]
        self._preprocess = [PreprocessReplica(machine, costs.preprocess) for _ in range(fleet.number("preprocess"))]
        self._encode = [EncodeReplica(machine, costs.encode, costs.model) for _ in range(fleet.number("encode"))]
        generate = partial(GenerateReplica, self.clock, machine, costs.generate, self._to_ingresses)
        self._generate = [generate() for _ in range(fleet.number("generate"))]
        self._to_preprocess = Router(self._preprocess, self._draw, costs.preprocess.max_ongoing_items)
        self._to_encode = Router(self._encode, self._draw)
        self._to_generate = Router(self._generate, self._draw)

    def add(self, arrival: Arrival) -> Answer:
        """Schedules the request's arrival."""
        door = self._draw.choice(self._doors)
        answer = Answer(arrival, door.relay)
        self.clock.after(arrival.moment, lambda: start(self._lead(answer, door)))
        return answer

    async def _lead(self, answer: Answer, door: _FrontDoor) -> None:
        costs, pictures = self.costs, answer.arrival.pictures
        share = costs.on_path_share.of(pictures)
        self._beside.submit(costs.beside.of_request(pictures))
        if self._client is not None:
            await self._client.pass_through(costs.client.of_request(pictures), share)
        await door.proxy.pass_through(costs.proxy.work.of_request(pictures), share)
        await door.ingress.pass_through(costs.ingress.work.of_request(pictures), share)
        await until(partial(self.clock.after, costs.wait_seconds.of(pictures)))
        await together(self._make(picture, share) for picture in pictures)
        num_tokens = answer.arrival.prompt_tokens + sum(map(costs.model.tokens, pictures))
        await self._to_generate.call(lambda replica: replica.work(answer, num_tokens, share))

    async def _make(self, picture: Picture, share: float) -> None:
        """Computes a new picture's embeddings. A repeated picture needs only the prompt's rendering."""
        shard = self._shards[picture.key % len(self._shards)]
        await shard.pass_through(self.costs.shared.work.of_picture(picture), share)
        if picture.is_repeated:
            renderer = self._draw.choice(self._preprocess).loop
            await renderer.pass_through(self.costs.preprocess.work.of_picture(picture), share)
            return
        await self._to_preprocess.call(lambda replica: replica.work(picture, share))
        await self._to_encode.call(lambda replica: replica.work(picture, share))

    def _to_ingresses(self, tokens: list[Answer]) -> None:
        by_relay: dict[TokenRelay, list[Answer]] = {}
        for answer in tokens:
            by_relay.setdefault(answer.relay, []).append(answer)
        for relay, own in by_relay.items():
            relay.send(own)

    def _deliver(self, tokens: list[Answer]) -> None:
        for answer in tokens:
            answer.add_token(self.clock.now)

    def busy_seconds(self) -> dict[str, float]:
        """Returns the CPU seconds so far: per stage, those of each replica's busiest thread; and the total."""
        return {
            "ingress": sum(door.ingress.busy_seconds for door in self._doors),
            "shared": sum(shard.busy_seconds for shard in self._shards),
            "preprocess": sum(max(one.loop.busy_seconds, one.worker.busy_seconds) for one in self._preprocess),
            "encode": sum(max(one.loop.busy_seconds, one.worker.busy_seconds) for one in self._encode),
            "generate": sum(max(one.loop.busy_seconds, one.step_seconds) for one in self._generate),
            _EVERYTHING: self._machine.busy_seconds,
        }

    @property
    def mean_batch(self) -> float:
        num_decoded = sum(one.scheduler.num_decoded_sequences for one in self._generate)
        return num_decoded / max(1, sum(one.num_steps for one in self._generate))


def simulate(
    costs: Costs, fleet: Fleet, load: Sequence[Arrival], *, seed: int = 0, window: tuple[float, float] = WHOLE
) -> Outcome:
    """Returns the outcome of the requests in `load`, sorted by time. Equal arguments give equal outcomes. `window`:
    only requests between these shares count, because the system is empty around the others."""
    pipeline = Pipeline(costs, fleet, seed)
    answers = [pipeline.add(arrival) for arrival in load]
    first = min(int(len(load) * window[0]), len(load) - 1)
    last = max(first + 1, round(len(load) * window[1]))
    notes: list[tuple[float, dict[str, float]]] = []

    def note() -> None:
        notes.append((pipeline.clock.now, pipeline.busy_seconds()))

    for arrival in (load[first], *load[last : last + 1]):
        pipeline.clock.after(arrival.moment, note)
    pipeline.clock.run()
    note()
    assert all(answer.num_tokens == answer.arrival.answer_tokens for answer in answers)
    (begin, before), (end, after) = notes[:2]
    busy = {name: (seconds - before[name]) / (end - begin) for name, seconds in after.items()}
    counted = answers[first:last]
    ttfts = [answer.time_to_first_token for answer in counted]
    tpots = [tpot for answer in counted if (tpot := answer.time_per_output_token) is not None]
    return Outcome(
        answers=answers,
        ttft_p50=percentile(ttfts, 50),
        ttft_p95=percentile(ttfts, 95),
        tpot_p50=percentile(tpots, 50) if tpots else None,
        tpot_p95=percentile(tpots, 95) if tpots else None,
        mean_latency=sum(answer.last_token - answer.arrival.moment for answer in counted) / len(counted),
        utilisation={stage: busy[stage] / fleet.number(stage) for stage in STAGES},
        cores_busy=busy[_EVERYTHING],
        mean_batch=pipeline.mean_batch,
    )
