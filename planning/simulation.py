"""A simulation of the pipeline: requests go through Ingress, Shared, Preprocess, Encode and Generate as through queues.

Each process is a queue of one thread with the costs that were measured for it. Processes have cores of their own, or
share those of one machine (`planning/cores.py`). See docs/planning.md for what is left out.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raylens.planning.cores import Cores, OwnCores, Process, SharedCores, event_loop, pass_through
from raylens.planning.costs import Costs
from raylens.planning.events import Action, EventLoop
from raylens.planning.language_engine import LanguageEngine
from raylens.planning.load import Arrival, Picture
from raylens.planning.outcome import WHOLE, BusySeconds, Ongoing, Outcome, Window, percentile
from raylens.planning.picture_stages import EncodeReplica, PictureRouter, PictureWork, PreprocessReplica
from raylens.planning.request_run import RequestRun
from raylens.planning.settings import PlanError
from raylens.planning.token_relay import TokenRelay, Tokens


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas of each stage. `cores`: those of the one machine that all of them share; None: every process has a
    core of its own. `has_client`: whether the load's client is on that machine, too. `background_cores`: what other
    programs take of it, besides the idle server."""

    ingress: int = 1
    shared: int = 1
    preprocess: int = 1
    encode: int = 1
    generate: int = 1
    cores: int | None = None
    has_client: bool = False
    background_cores: float = 0.0

    def __post_init__(self) -> None:
        for stage, count in self.replicas.items():
            if count < 1:
                raise PlanError(f"replicas of {stage}: must be at least 1, not {count}")
        if self.cores is not None and self.cores < 1:
            raise PlanError(f"cores: must be at least 1, not {self.cores}")

    @classmethod
    def of(cls, replicas: Mapping[str, int], cores: int | None = None) -> "Fleet":
        """Returns a fleet of so many replicas of each stage, without a client on its machine."""
        return cls(
            replicas["ingress"],
            replicas["shared"],
            replicas["preprocess"],
            replicas["encode"],
            replicas["generate"],
            cores=cores,
        )

    @property
    def replicas(self) -> dict[str, int]:
        return {
            "ingress": self.ingress,
            "shared": self.shared,
            "preprocess": self.preprocess,
            "encode": self.encode,
            "generate": self.generate,
        }


class GenerateReplica:
    """The two threads of Generate: the engine's, and the one that takes requests and sends tokens."""

    def __init__(self, pipeline: "Pipeline", cores: Cores) -> None:
        costs = pipeline.costs.generate
        self.loop = event_loop(cores)
        self.engine_thread = Process(cores)
        self.relay = TokenRelay(self.loop, costs.work, pipeline.to_ingresses)
        self.engine = LanguageEngine(pipeline.events, self.engine_thread, self.loop, costs, self._hand_on)
        self.num_ongoing = 0

    def _hand_on(self, requests: list[RequestRun]) -> None:
        self.num_ongoing -= sum(request.num_generated == request.arrival.answer_tokens for request in requests)
        self.relay.send(Counter(requests))


class FrontDoor:
    """A replica of Ingress with the proxy in front of it."""

    def __init__(self, pipeline: "Pipeline", cores: Cores) -> None:
        costs = pipeline.costs
        self.proxy, self.ingress = event_loop(cores), event_loop(cores)
        self.proxy_relay = TokenRelay(self.proxy, costs.proxy.work, pipeline.to_client)
        self.relay = TokenRelay(self.ingress, costs.ingress.work, self.proxy_relay.send)


class Pipeline:
    """All processes, and the way of a request through them."""

    def __init__(self, costs: Costs, fleet: Fleet, seed: int) -> None:
        self.costs = costs
        self.events = EventLoop()
        self.ongoing = Ongoing()
        self._draw = random.Random(seed)
        background = costs.background_cores + fleet.background_cores
        cores: Cores = (
            OwnCores(self.events) if fleet.cores is None else SharedCores(self.events, fleet.cores, background)
        )
        self.fleet = fleet
        self._client = Process(cores) if fleet.has_client else None
        self._client_relay = None if self._client is None else TokenRelay(self._client, costs.client, self._deliver)
        self._beside = Process(cores)
        self._doors = [FrontDoor(self, cores) for _ in range(fleet.ingress)]
        self._shards = [event_loop(cores) for _ in range(fleet.shared)]
        self._preprocess = [PreprocessReplica(cores, costs.preprocess) for _ in range(fleet.preprocess)]
        self._encode = [EncodeReplica(cores, costs.encode, costs.model) for _ in range(fleet.encode)]
        self._generate = [GenerateReplica(self, cores) for _ in range(fleet.generate)]
        self._to_preprocess = PictureRouter(list(self._preprocess), costs.preprocess.max_ongoing_items)
        self._to_encode = PictureRouter(list(self._encode))

    def add(self, arrival: Arrival) -> RequestRun:
        """Lets the request come at its moment."""
        pictures = arrival.pictures
        request = RequestRun(
            arrival,
            ingress=self._draw.randrange(len(self._doors)),
            prompt_tokens=arrival.prompt_tokens + sum(self.costs.model.tokens(picture) for picture in pictures),
            on_path_share=self.costs.on_path_share.of(pictures),
            wait_seconds=self.costs.wait_seconds.of(pictures),
        )
        self.events.at(arrival.moment, lambda: self._arrive(request))
        return request

    def note_busy(self, moment: float, notes: list[BusySeconds]) -> None:
        """Adds to `notes`, at that moment, what each stage has computed by then."""
        self.events.at(moment, lambda: notes.append(self.busy_seconds()))

    def _arrive(self, request: RequestRun) -> None:
        pictures = request.arrival.pictures
        door = self._doors[request.ingress]
        costs = self.costs

        def to_proxy() -> None:
            self._hop(door.proxy, costs.proxy.work.of_request(pictures), request, to_ingress)

        def to_ingress() -> None:
            self._hop(door.ingress, costs.ingress.work.of_request(pictures), request, behind_ingress)

        def behind_ingress() -> None:
            self.events.after(request.wait_seconds, lambda: self._order_pictures(request))

        self.ongoing.change(1, self.events.now)
        self._beside.submit(costs.beside.of_request(pictures))
        if self._client is None:
            to_proxy()
        else:
            self._hop(self._client, costs.client.of_request(pictures), request, to_proxy)

    def _hop(self, process: Process, seconds: float, request: RequestRun, then: Action) -> None:
        pass_through(process, seconds, request.on_path_share, then)

    def _order_pictures(self, request: RequestRun) -> None:
        for picture in request.arrival.pictures:
            self._order(request, picture)
        if not request.arrival.pictures:
            self._generate_answer(request)

    def _order(self, request: RequestRun, picture: Picture) -> None:
        shard = self._shards[picture.key % len(self._shards)]
        share = request.on_path_share
        renderer = self._preprocess[picture.key // 7 % len(self._preprocess)].loop

        def encoded() -> None:
            request.num_pictures_missing -= 1
            if request.num_pictures_missing == 0:
                self._generate_answer(request)

        def processed() -> None:
            self._to_encode.send(PictureWork(picture, share, encoded))

        def ordered() -> None:
            if picture.is_repeated:  # all that is left to do is the prompt, which goes past items
                self._hop(renderer, self.costs.preprocess.work.of_picture(picture), request, encoded)
            else:
                self._to_preprocess.send(PictureWork(picture, share, processed))

        self._hop(shard, self.costs.shared.work.of_picture(picture), request, ordered)

    def _generate_answer(self, request: RequestRun) -> None:
        """Sends the request to the less loaded of two random replicas, as Ray Serve does."""
        chosen = self._draw.sample(self._generate, min(2, len(self._generate)))
        replica = min(chosen, key=lambda one: one.num_ongoing)
        replica.num_ongoing += 1
        seconds = self.costs.generate.work.of_request(request.arrival.pictures)
        self._hop(replica.loop, seconds, request, lambda: replica.engine.add(request))

    def to_ingresses(self, tokens: Tokens) -> None:
        by_ingress: dict[int, Tokens] = {}
        for request, count in tokens.items():
            by_ingress.setdefault(request.ingress, Counter())[request] = count
        for ingress, own in by_ingress.items():
            self._doors[ingress].relay.send(own)

    def to_client(self, tokens: Tokens) -> None:
        if self._client_relay is None:
            self._deliver(tokens)
        else:
            self._client_relay.send(tokens)

    def _deliver(self, tokens: Tokens) -> None:
        for request, count in tokens.items():
            request.deliver(count, self.events.now)
            if request.is_done:
                self.ongoing.change(-1, self.events.now)

    def busy_seconds(self) -> BusySeconds:
        """Returns what has been computed so far: by the busiest thread of each replica of a stage, and by all."""
        pictures: list[PreprocessReplica | EncodeReplica] = [*self._preprocess, *self._encode]
        pairs = {one: (one.loop.busy_seconds, one.worker.busy_seconds) for one in pictures}
        engines = [(one.loop.busy_seconds, one.engine_thread.busy_seconds) for one in self._generate]
        doors = sum(door.ingress.busy_seconds for door in self._doors)
        shards = sum(shard.busy_seconds for shard in self._shards)
        others = [self._beside, *([self._client] if self._client else []), *(door.proxy for door in self._doors)]
        return BusySeconds(
            stages={
                "ingress": doors,
                "shared": shards,
                "preprocess": sum(max(pairs[one]) for one in self._preprocess),
                "encode": sum(max(pairs[one]) for one in self._encode),
                "generate": sum(max(one.loop.busy_seconds, one.engine.step_seconds) for one in self._generate),
            },
            everything=doors
            + shards
            + sum(map(sum, pairs.values()))
            + sum(map(sum, engines))
            + sum(other.busy_seconds for other in others),
        )

    @property
    def mean_batch(self) -> float:
        """Returns how many sequences decode in a step of Generate."""
        steps = sum(one.engine.num_steps for one in self._generate)
        return sum(one.engine.num_sequences for one in self._generate) / max(1, steps)


def simulate(costs: Costs, fleet: Fleet, load: Sequence[Arrival], *, seed: int = 0, window: Window = WHOLE) -> Outcome:
    """Returns what becomes of the requests of `load`, which are in the order of their moments. Equal arguments give
    equal outcomes. Raises PlanError for no requests."""
    return run(costs, fleet, load, seed=seed, window=window)[0]


def run(
    costs: Costs, fleet: Fleet, load: Sequence[Arrival], *, seed: int = 0, window: Window = WHOLE
) -> tuple[Outcome, list[RequestRun]]:
    """Returns what `simulate` returns, and each request, in the order of `load`."""
    if not load:
        raise PlanError("load: must have at least 1 request, not 0")
    pipeline = Pipeline(costs, fleet, seed)
    requests = [pipeline.add(arrival) for arrival in load]
    notes: list[BusySeconds] = []
    first, last = window.of(len(requests))
    begin = load[first].moment
    pipeline.note_busy(begin, notes)
    if last < len(requests):
        pipeline.note_busy(load[last].moment, notes)
    pipeline.events.run()
    assert all(request.is_done for request in requests)
    end = load[last].moment if last < len(requests) else pipeline.events.now
    notes.append(pipeline.busy_seconds())
    busy = notes[1].since(notes[0])
    return outcome_of(requests, first, last, busy, end - begin, pipeline), requests


def outcome_of(
    requests: list[RequestRun], first: int, last: int, busy: BusySeconds, seconds: float, pipeline: Pipeline
) -> Outcome:
    """Returns the figures of requests [first, last), which came in `seconds`."""
    counted = requests[first:last]
    tpots = [tpot for request in counted if (tpot := request.time_per_output_token) is not None]
    ttfts = [request.time_to_first_token for request in counted]
    latencies = [request.last_token - request.arrival.moment for request in counted]
    whole = max(request.last_token for request in requests) - requests[0].arrival.moment
    replicas = pipeline.fleet.replicas
    return Outcome(
        requests_per_second=len(requests) / whole,
        tokens_per_second=sum(request.arrival.answer_tokens for request in requests) / whole,
        ttft_p50=percentile(ttfts, 50),
        ttft_p95=percentile(ttfts, 95),
        tpot_p50=percentile(tpots, 50) if tpots else None,
        tpot_p95=percentile(tpots, 95) if tpots else None,
        utilisation={stage: used / seconds / replicas[stage] for stage, used in busy.stages.items()},
        cores_busy=busy.everything / seconds,
        mean_ongoing=pipeline.ongoing.mean(whole),
        mean_latency=sum(latencies) / len(latencies),
        mean_batch=pipeline.mean_batch,
    )
