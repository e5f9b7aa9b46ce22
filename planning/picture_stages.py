"""Simulated replicas of Preprocess and Encode, and the choice of a replica for a picture."""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from raylens.planning.cores import Cores, Process, event_loop, pass_through
from raylens.planning.costs import EncodeCosts, ModelSizes, PreprocessCosts
from raylens.planning.events import Action
from raylens.planning.load import Picture

_BALANCE_FACTOR = 1.25
_MIN_BOUND = 4
"""From how many pictures on a replica is passed over: see `LoadBound` of `deployments/routing/room_router.py`."""


@dataclass(slots=True, eq=False)
class PictureWork:
    """A picture that a stage works on; `then` is called when it is done."""

    picture: Picture
    on_path_share: float
    then: Action


class PictureReplica(Protocol):
    """A replica that works on pictures and knows how many it has."""

    num_ongoing: int

    def add(self, work: PictureWork) -> None: ...


class PreprocessReplica:
    """Decodes pictures and runs the processor on them, one after the other."""

    def __init__(self, cores: Cores, costs: PreprocessCosts) -> None:
        self._costs = costs
        self.loop = event_loop(cores)
        self.worker = Process(cores, costs.niceness)
        self.num_ongoing = 0

    def add(self, work: PictureWork) -> None:
        self.num_ongoing += 1
        beside = self._costs.work.of_picture(work.picture)
        computing = self._costs.seconds_per_item + self._costs.seconds_per_megapixel * work.picture.megapixels
        compute = partial(self.worker.submit, computing, partial(self._end, work))
        pass_through(self.loop, beside, work.on_path_share, compute)

    def _end(self, work: PictureWork) -> None:
        self.num_ongoing -= 1
        work.then()


class EncodeReplica:
    """Encodes pictures in batches. The oldest leads a batch, and others join as far as they fit, unless they have more
    than half of `max_batch_patches`. `encoder/scheduler.py` also lets short pictures go first, which is the same where
    all have one size."""

    def __init__(self, cores: Cores, costs: EncodeCosts, model: ModelSizes) -> None:
        self._costs = costs
        self._model = model
        self.loop = event_loop(cores)
        self.worker = Process(cores, costs.niceness)
        self.num_ongoing = 0
        self.num_batches = 0
        self._waiting: deque[PictureWork] = deque()
        self._is_running = False

    def add(self, work: PictureWork) -> None:
        self.num_ongoing += 1
        beside = self._costs.work.of_picture(work.picture)
        pass_through(self.loop, beside, work.on_path_share, partial(self._wait, work))

    def _wait(self, work: PictureWork) -> None:
        self._waiting.append(work)
        if not self._is_running:
            self._start()

    def _start(self) -> None:
        self._is_running = bool(self._waiting)
        if self._is_running:
            self.num_batches += 1
            batch = self._next_batch()
            patches = sum(self._model.patches(work.picture) for work in batch)
            seconds = self._costs.seconds_per_batch + self._costs.seconds_per_patch * patches
            self.worker.submit(seconds, lambda: self._end(batch))

    def _next_batch(self) -> list[PictureWork]:
        batch = [self._waiting.popleft()]
        room = self._costs.max_batch_patches - self._model.patches(batch[0].picture)
        for work in list(self._waiting):
            patches = self._model.patches(work.picture)
            if patches <= room and 2 * patches <= self._costs.max_batch_patches:
                self._waiting.remove(work)
                batch.append(work)
                room -= patches
        return batch

    def _end(self, batch: list[PictureWork]) -> None:
        self.num_ongoing -= len(batch)
        self._start()
        for work in batch:
            work.then()


class PictureRouter:
    """Sends a picture to the replica that its key prefers, or to the next one of its order if that has far more than
    the others. Rendezvous hashing gives each key an order of its own; here a random order by the key stands for it."""

    def __init__(self, replicas: list[PictureReplica], limit: float = math.inf) -> None:
        self._replicas = replicas
        self._limit = limit
        self._waiting: deque[PictureWork] = deque()

    def send(self, work: PictureWork) -> None:
        """Sends the picture, or lets it wait behind earlier ones while every replica has `limit` in work."""
        self._waiting.append(work)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and min(replica.num_ongoing for replica in self._replicas) < self._limit:
            work = self._waiting.popleft()
            self._choose(work.picture.key).add(
                PictureWork(work.picture, work.on_path_share, self._then_go_on(work.then))
            )

    def _then_go_on(self, then: Action) -> Callable[[], None]:
        def both() -> None:
            then()
            self._go_on()

        return both

    def _choose(self, key: int) -> PictureReplica:
        if len(self._replicas) == 1:
            return self._replicas[0]
        total = sum(replica.num_ongoing for replica in self._replicas)
        bound = min(self._limit, max(_MIN_BOUND, math.ceil(_BALANCE_FACTOR * (total + 1) / len(self._replicas))))
        order = random.Random(key).sample(self._replicas, len(self._replicas))
        within = (replica for replica in order if replica.num_ongoing < bound)
        with_room = (replica for replica in order if replica.num_ongoing < self._limit)
        return next(within, next(with_room))
