"""Processor cores, and the processes that compute on them."""

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from raylens.planning.virtual_time import Action, Clock, until

_NICE_FACTOR = 1.25
"""Each step of niceness divides a thread's share of a contended core by this factor (Linux, kernel/sched/core.c,
sched_prio_to_weight)."""
LOOP_SLICE_SECONDS = 0.001
"""An event loop turns to the next request after this long: callbacks are about as short."""
_LEAST_SLICE_SECONDS = 1e-12


class Machine:
    """`count` cores that processes share as Linux does: each core has a queue of its own.

    A thread that becomes ready goes to its last core if that is idle, else to any idle core. If none is idle, it shares
    its last core with the threads there, by the weights of their niceness (processor sharing). A core that becomes idle
    takes a thread of the fullest core. Other programs take `background` cores all the time, spread over all of them.
    With `count` None, each process has a core of its own.

    (`select_idle_sibling` and `sched_balance_newidle` in kernel/sched/fair.c.)
    """

    def __init__(self, clock: Clock, count: int | None, background: float = 0.0) -> None:
        self._clock = clock
        num_cores = count or 0
        speed = max(0.01, 1 - background / max(1, num_cores))
        self._cores = [_Core(clock, speed, self._take_over) for _ in range(num_cores)]
        self._homes = itertools.cycle(self._cores)
        self.busy_seconds = 0.0

    def home(self) -> "_Core | None":
        """Returns the first core of another process, None for a core of its own."""
        return next(self._homes, None)

    def compute(self, process: "Process", seconds: float, then: Action) -> None:
        """Calls `then` when the process has had `seconds` of processor time."""
        self.busy_seconds += seconds
        if process.core is None:
            self._clock.after(seconds, then)
            return
        if process.core.tasks:
            process.core = next((core for core in self._cores if not core.tasks), process.core)
        process.core.add(process, seconds, then)

    def _take_over(self, idle: "_Core") -> None:
        fullest = max(self._cores, key=lambda core: len(core.tasks))
        if len(fullest.tasks) > 1:
            process, seconds, then = fullest.give_up()
            process.core = idle
            idle.add(process, seconds, then)


@dataclass(slots=True)
class _Task:
    """`end`: the core's progress at which the task is done."""

    process: "Process"
    end: float
    then: Action


class _Core:
    """A core that its tasks share by their weights. `speed`: the share of it that other programs leave."""

    def __init__(self, clock: Clock, speed: float, when_idle: Callable[["_Core"], None]) -> None:
        self._clock = clock
        self._speed = speed
        self._when_idle = when_idle
        self.tasks: list[_Task] = []
        self._progress = 0.0
        """The seconds so far that a task of weight 1 would have had."""
        self._weight = 0.0
        self._updated_at = 0.0
        self._plan = 0

    def add(self, process: "Process", seconds: float, then: Action) -> None:
        self._advance()
        self.tasks.append(_Task(process, self._progress + seconds / process.weight, then))
        self._plan_end()

    def give_up(self) -> tuple["Process", float, Action]:
        """Removes the latest task and returns its process, its seconds that are left, and its action."""
        self._advance()
        task = self.tasks.pop()
        self._plan_end()
        return task.process, (task.end - self._progress) * task.process.weight, task.then

    def _advance(self) -> None:
        if self.tasks:
            self._progress += (self._clock.now - self._updated_at) * self._speed / self._weight
        self._updated_at = self._clock.now

    def _plan_end(self) -> None:
        """Plans the end of the first task; any change of the tasks before it makes another plan."""
        self._plan += 1
        if self.tasks:
            self._weight = sum([task.process.weight for task in self.tasks])
            seconds = (min([task.end for task in self.tasks]) - self._progress) * self._weight / self._speed
            self._clock.after(max(0.0, seconds), partial(self._end, self._plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        first = min([task.end for task in self.tasks])
        ended = [task for task in self.tasks if task.end == first]
        self.tasks = [task for task in self.tasks if task.end != first]
        self._plan_end()
        for task in ended:
            task.then()
        if not self.tasks:
            self._when_idle(self)


Cost = float | Callable[[], float]


class Process:
    """A thread, which does its work in the order of arrival.

    With `slice_seconds` it is an event loop: it does the work in slices, by turns. The `core` is the last one that it
    computed on, and `weight` its share there beside others."""

    def __init__(self, machine: Machine, niceness: int = 0, slice_seconds: float = math.inf) -> None:
        self._machine = machine
        self.core = machine.home()
        self.weight: float = _NICE_FACTOR**-niceness
        self._slice_seconds = slice_seconds
        self._work: deque[tuple[Cost, Action]] = deque()
        self._is_busy = False
        self.busy_seconds = 0.0

    def submit(self, cost: Cost, then: Action = lambda: None) -> None:
        """Queues work and calls `then` when it is done. A `cost` that is a function is called when the work begins."""
        self._work.append((cost, then))
        if not self._is_busy:
            self._start()

    async def compute(self, seconds: float) -> None:
        await until(partial(self.submit, seconds))

    async def pass_through(self, seconds: float, on_path_share: float) -> None:
        """Does a request's work: returns after the share that the request waits for, and does the rest behind it."""
        await self.compute(seconds * on_path_share)
        self.submit(seconds * (1 - on_path_share))

    def _start(self) -> None:
        while self._work and not self._is_busy:
            cost, then = self._work.popleft()
            self._is_busy = True
            left = cost() if callable(cost) else cost
            seconds = min(left, self._slice_seconds)
            if left - seconds > _LEAST_SLICE_SECONDS:
                then = partial(self._work.append, (left - seconds, then))
            if seconds > 0:
                self.busy_seconds += seconds
                self._machine.compute(self, seconds, partial(self._end, then))
            else:
                then()
                self._is_busy = False

    def _end(self, then: Action) -> None:
        then()  # still busy, so that the work that this submits waits for its turn
        self._is_busy = False
        self._start()


def event_loop(machine: Machine) -> Process:
    """Returns a process that takes turns among its work, as an event loop of asyncio does."""
    return Process(machine, slice_seconds=LOOP_SLICE_SECONDS)
