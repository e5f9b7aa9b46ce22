"""CPU cores, and the processes that run on them."""

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
"""An event loop switches to the next request after this long, about the length of a callback."""
_LEAST_SLICE_SECONDS = 1e-12

Cost = float | Callable[[], float]


class Machine:
    """`count` cores that processes share as in Linux (`select_idle_sibling` and `sched_balance_newidle` in
    kernel/sched/fair.c). With `count` None, each process has its own core.

    Each core has its own run queue. A ready thread goes to its last core if that is idle, else to any idle core. If
    none is idle, it shares its last core by the weights of niceness (processor sharing). A core that becomes idle takes
    a thread from the fullest core. Other programs use `background` cores all the time, spread over all cores."""

    def __init__(self, clock: Clock, count: int | None, background: float = 0.0) -> None:
        self._clock = clock
        num_cores = count or 0
        speed = max(0.01, 1 - background / max(1, num_cores))
        self._cores = [_Core(clock, speed, self._take_over) for _ in range(num_cores)]
        self._homes = itertools.cycle(self._cores)
        self.busy_seconds = 0.0

    def home(self) -> "_Core | None":
        """Returns the first core of another process, None for its own core."""
        return next(self._homes, None)

    def compute(self, process: "Process", seconds: float, then: Action) -> None:
        """Calls `then` when the process has had `seconds` of CPU time."""
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
    process: "Process"
    end: float  # the core's progress at which the task is done
    then: Action


class _Core:
    """A core that its tasks share by weight. `speed`: the share that other programs leave."""

    def __init__(self, clock: Clock, speed: float, when_idle: Callable[["_Core"], None]) -> None:
        self._clock = clock
        self._speed = speed
        self._when_idle = when_idle
        self.tasks: list[_Task] = []
        self._progress = 0.0  # CPU seconds of a task of weight 1 so far
        self._weight = self._updated_at = 0.0
        self._plan = 0

    def add(self, process: "Process", seconds: float, then: Action) -> None:
        self._advance()
        self.tasks.append(_Task(process, self._progress + seconds / process.weight, then))
        self._plan_end()

    def give_up(self) -> tuple["Process", float, Action]:
        """Removes the latest task and returns its process, its remaining seconds, and its action."""
        self._advance()
        task = self.tasks.pop()
        self._plan_end()
        return task.process, (task.end - self._progress) * task.process.weight, task.then

    def _advance(self) -> None:
        if self.tasks:
            self._progress += (self._clock.now - self._updated_at) * self._speed / self._weight
        self._updated_at = self._clock.now

    def _plan_end(self) -> None:
        """Schedules the end of the first task; any later change of the tasks replaces this plan."""
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


class Process:
    """A thread that works in order of arrival; with `slice_seconds`, an event loop, which works round-robin in slices.
    `core`: the last core used. `weight`: its share of a contended core."""

    def __init__(self, machine: Machine, niceness: int = 0, slice_seconds: float = math.inf) -> None:
        self._machine = machine
        self.core = machine.home()
        self.weight: float = _NICE_FACTOR**-niceness
        self._slice_seconds = slice_seconds
        self._work: deque[tuple[Cost, Action]] = deque()
        self._is_busy = False
        self.busy_seconds = 0.0

    def submit(self, cost: Cost, then: Action = lambda: None) -> None:
        """Queues work and calls `then` when it is done. If `cost` is a function, it is called when the work begins."""
        self._work.append((cost, then))
        if not self._is_busy:
            self._start()

    async def compute(self, seconds: float) -> None:
        await until(partial(self.submit, seconds))

    async def pass_through(self, seconds: float, on_path_share: float) -> None:
        """Does a request's work: returns after the share that delays the request, and does the rest afterwards."""
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
        then()  # still busy, so that work submitted by `then` waits for its turn
        self._is_busy = False
        self._start()


def event_loop(machine: Machine) -> Process:
    """Returns a process that works round-robin, like an asyncio event loop."""
    return Process(machine, slice_seconds=LOOP_SLICE_SECONDS)
