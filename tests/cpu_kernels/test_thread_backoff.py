"""Cores that other processes want are left to them, and taken when they are free."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from raylens.cpu_kernels import threads as kernel_threads
from raylens.cpu_kernels.threads import ThreadBackoff

STEP_SECONDS = 0.03


class Machine:
    """One whose cores others want or leave idle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = self.idle_seconds = self.cpu_seconds = 0.0
        self.num_switches = 0
        self.switches_per_step = 1
        self.computing_share = 1.0
        self.num_idle = 0.0
        monkeypatch.setattr(kernel_threads, "perf_counter", lambda: self.seconds)
        monkeypatch.setattr(kernel_threads, "_idle_core_seconds", lambda: self.idle_seconds)
        monkeypatch.setattr(kernel_threads, "process_time", lambda: self.cpu_seconds)
        monkeypatch.setattr(kernel_threads, "_involuntary_switches", lambda: self.num_switches)

    def want_cores(self, *, idle: float = 0.0) -> None:
        """Has others compute all the time, but for so many idle cores."""
        self.switches_per_step, self.computing_share, self.num_idle = 5, 0.5, idle

    def free_cores(self, idle: float) -> None:
        self.switches_per_step, self.computing_share, self.num_idle = 1, 1.0, idle

    def run(self, threads: ThreadBackoff, num_steps: int) -> list[int]:
        numbers = []
        for _ in range(num_steps):
            numbers.append(threads.next_number())
            self.num_switches += numbers[-1] * self.switches_per_step
            self.cpu_seconds += numbers[-1] * self.computing_share * STEP_SECONDS
            self.seconds += STEP_SECONDS
            self.idle_seconds += STEP_SECONDS * self.num_idle
            threads.note(STEP_SECONDS)
        return numbers


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_free_cores_are_all_used(machine: Machine) -> None:
    assert machine.run(ThreadBackoff(4), 100) == [4] * 100


def test_wanted_cores_are_left_at_once_and_not_tried_while_nothing_is_idle(machine: Machine) -> None:
    machine.want_cores()
    assert machine.run(ThreadBackoff(2), 100) == [2] + [1] * 99


def test_short_tasks_of_others_take_no_thread_away(machine: Machine) -> None:
    machine.switches_per_step, machine.computing_share = 20, 0.85
    assert machine.run(ThreadBackoff(2), 100) == [2] * 100


def test_work_that_is_for_one_thread_in_part_takes_no_thread_away(machine: Machine) -> None:
    machine.computing_share = 0.6
    assert machine.run(ThreadBackoff(2), 100) == [2] * 100


def test_of_many_threads_half_go_at_a_time(machine: Machine) -> None:
    machine.want_cores()
    assert machine.run(ThreadBackoff(12), 5) == [12, 6, 3, 1, 1]


def test_cores_that_become_idle_are_taken(machine: Machine) -> None:
    threads = ThreadBackoff(4)
    machine.want_cores()
    machine.run(threads, 20)
    machine.free_cores(idle=1.0)
    # A core is enough for a second thread, and not for two more.
    assert machine.run(threads, 20)[-10:] == [2] * 10
    machine.free_cores(idle=2.0)
    assert machine.run(threads, 20)[-10:] == [4] * 10


def test_a_core_that_is_idle_half_of_the_time_is_not_taken(machine: Machine) -> None:
    threads = ThreadBackoff(2)
    machine.want_cores(idle=0.5)
    assert machine.run(threads, 100) == [2] + [1] * 99


def test_one_thread_stays_one(machine: Machine) -> None:
    machine.want_cores()
    assert machine.run(ThreadBackoff(1), 50) == [1] * 50


@contextmanager
def busy_cores() -> Iterator[None]:
    """Programs that keep all cores busy."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_the_system_tells_that_cores_are_wanted() -> None:
    before = kernel_threads._involuntary_switches()
    matrix = torch.randn(512, 512)
    with busy_cores():
        for _ in range(300):
            matrix = (matrix @ matrix).clamp(-1, 1)
    assert kernel_threads._involuntary_switches() - before > 10


def test_the_system_tells_that_cores_are_idle() -> None:
    before = kernel_threads._idle_core_seconds()
    with busy_cores():
        time.sleep(0.5)
    assert 0.0 <= kernel_threads._idle_core_seconds() - before <= 0.5 * (os.cpu_count() or 1) + 0.1
