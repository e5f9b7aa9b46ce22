"""Where work is computed: cores of its own for each process, or one machine whose cores all processes share."""

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from raylens.planning.events import Action, EventLoop

_NICE_FACTOR = 1.25
"""Each step of niceness makes a thread's share of a contended core smaller by this factor (Linux,
kernel/sched/core.c, sched_prio_to_weight)."""
_EPSILON = 1e-12


class Thread(Protocol):
    """Computes one piece of work at a time."""

    def compute(self, seconds: float, then: Action) -> None:
        """Calls `then` when `seconds` of processor time have been computed."""


class Cores(Protocol):
    """What threads compute on."""

    def thread(self, niceness: int) -> Thread: ...


class OwnCores:
    """A core for every thread: work takes its processor time."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop

    def thread(self, niceness: int) -> "OwnCores":
        return self

    def compute(self, seconds: float, then: Action) -> None:
        self._loop.after(seconds, then)


class SharedCores:
    """`count` cores of one machine, shared as Linux shares them: each core has a queue of its own.

    A thread that becomes ready goes to the core where it was last, or else to an idle one. If none is idle, it shares
    its last core with whom it meets there, by the weights of their niceness (processor sharing). A core that becomes
    idle takes a thread of the fullest other one. `background` cores, spread over all, are taken by others all the time.

    (`select_idle_sibling` and `sched_balance_newidle` in kernel/sched/fair.c.)
    """

    def __init__(self, loop: EventLoop, count: int, background: float = 0.0) -> None:
        speed = max(0.01, 1 - background / count)
        self._cores = [_Core(loop, speed, self._take_over) for _ in range(count)]
        self._homes = itertools.cycle(self._cores)

    def thread(self, niceness: int) -> "_SharedThread":
        return _SharedThread(self, next(self._homes), _NICE_FACTOR**-niceness)

    def place(self, home: "_Core") -> "_Core":
        """Returns where a thread goes that was last on `home`."""
        if home.is_idle:
            return home
        return next((core for core in self._cores if core.is_idle), home)

    def _take_over(self, idle: "_Core") -> None:
        fullest = max(self._cores, key=lambda core: core.num_tasks)
        if fullest.num_tasks > 1:
            task = fullest.give_up()
            task.thread.core = idle
            idle.add(task)


class _SharedThread:
    def __init__(self, cores: SharedCores, core: "_Core", weight: float) -> None:
        self._cores = cores
        self.core = core
        self.weight = weight

    def compute(self, seconds: float, then: Action) -> None:
        self.core = self._cores.place(self.core)
        self.core.add(_Task(self, seconds, then))


@dataclass(slots=True, eq=False)
class _Task:
    thread: _SharedThread
    seconds_left: float
    then: Action


class _Core:
    """A core that its threads share by their weights. `speed`: the share of it that is theirs."""

    def __init__(self, loop: EventLoop, speed: float, when_idle: Callable[["_Core"], None]) -> None:
        self._loop = loop
        self._speed = speed
        self._when_idle = when_idle
        self._tasks: list[_Task] = []
        self._updated_at = 0.0
        self._plan = 0

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def add(self, task: _Task) -> None:
        self._advance()
        self._tasks.append(task)
        self._share()

    def give_up(self) -> _Task:
        """Gives up the thread that came last."""
        self._advance()
        task = self._tasks.pop()
        self._share()
        return task

    def _advance(self) -> None:
        """Takes off what has been computed since the shares were last set."""
        passed = self._loop.now - self._updated_at
        self._updated_at = self._loop.now
        if passed > 0 and self._tasks:
            of_weight = passed * self._speed / sum(task.thread.weight for task in self._tasks)
            for task in self._tasks:
                task.seconds_left -= of_weight * task.thread.weight

    def _share(self) -> None:
        """Comes back when the first task is done, unless the tasks change before."""
        self._plan += 1
        if self._tasks:
            weight = sum(task.thread.weight for task in self._tasks)
            first = min(task.seconds_left / task.thread.weight for task in self._tasks) * weight / self._speed
            self._loop.after(max(0.0, first), partial(self._end, self._plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:  # the tasks have changed since
            return
        self._advance()
        ended = [task for task in self._tasks if task.seconds_left <= _EPSILON * max(1.0, self._loop.now)]
        self._tasks = [task for task in self._tasks if task not in ended]
        self._share()
        for task in ended:
            task.then()
        if self.is_idle:
            self._when_idle(self)


Cost = float | Callable[[], float]
LOOP_SLICE_SECONDS = 0.001
"""How long an event loop goes on with one request before it turns to the next: callbacks are about as short."""


@dataclass(slots=True)
class _Job:
    cost: Cost | None
    """None once it has been asked."""
    seconds_left: float
    then: Action | None


class Process:
    """A thread, which does one piece of work after the other in the order of arrival.

    With `slice_seconds` it is an event loop: work is done in slices, and all that waits takes turns."""

    def __init__(self, cores: Cores, niceness: int = 0, slice_seconds: float = math.inf) -> None:
        self._thread = cores.thread(niceness)
        self._slice_seconds = slice_seconds
        self._queue: deque[_Job] = deque()
        self._is_busy = False
        self.busy_seconds = 0.0

    def submit(self, cost: Cost, then: Action | None = None) -> None:
        """Queues work and calls `then` when it is done. A `cost` that is a function is asked when the work begins."""
        self._queue.append(_Job(cost, 0.0, then))
        if not self._is_busy:
            self._start()

    def _start(self) -> None:
        while self._queue and not self._is_busy:
            job = self._queue.popleft()
            if job.cost is not None:
                job.seconds_left = job.cost if isinstance(job.cost, float | int) else job.cost()
                job.cost = None
            self._is_busy = True
            seconds = min(job.seconds_left, self._slice_seconds)
            job.seconds_left -= seconds
            if seconds > 0:
                self.busy_seconds += seconds
                self._thread.compute(seconds, partial(self._end_slice, job))
            else:
                self._end(job)

    def _end_slice(self, job: _Job) -> None:
        if job.seconds_left > _EPSILON:
            self._queue.append(job)
            self._is_busy = False
        else:
            self._end(job)
        self._start()

    def _end(self, job: _Job) -> None:
        """Calls `then` while the process still counts as busy, so that what it submits waits for its turn."""
        if job.then is not None:
            job.then()
        self._is_busy = False


def pass_through(process: Process, seconds: float, on_path_share: float, then: Action) -> None:
    """Lets a process do what it does for a request: the share that the request waits for, and behind it the rest."""

    def go_on() -> None:
        then()
        process.submit(seconds * (1 - on_path_share))

    process.submit(seconds * on_path_share, go_on)


def event_loop(cores: Cores) -> Process:
    """Returns a process that does all it has in turns, as an event loop of asyncio does."""
    return Process(cores, slice_seconds=LOOP_SLICE_SECONDS)
