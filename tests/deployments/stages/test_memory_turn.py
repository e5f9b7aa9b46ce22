"""Processes that share a GPU plan its memory one after the other."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.config import AppConfig
from deployments.stages.memory_turn import memory_turn, turn

HOLDER = """
import sys, time
from pathlib import Path
from deployments.stages.memory_turn import turn

file, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
with turn(file):
    with log.open("a") as lines:
        print("begin", file=lines, flush=True)
        print("begun", flush=True)
        time.sleep(seconds)
        print("end", file=lines, flush=True)
"""


def hold(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(folder / "lock"), str(folder / "log"), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


def begun(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_two_processes_plan_one_after_the_other(tmp_path: Path) -> None:
    processes = [hold(tmp_path, 0.3) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text().split() == ["begin", "end"] * 2


def test_a_process_that_dies_in_its_turn_holds_up_nobody(tmp_path: Path) -> None:
    with hold(tmp_path, 60) as first:
        assert begun(first) == "begun\n"
        with hold(tmp_path, 0) as second:
            first.send_signal(signal.SIGKILL)
            assert second.wait(60) == 0
    assert (tmp_path / "log").read_text().split() == ["begin", "begin", "end"]


def test_a_turn_that_fails_is_over(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too small"), turn(tmp_path / "lock"):
        raise ValueError("too small")
    with hold(tmp_path, 0) as other:
        assert other.wait(60) == 0


def test_on_the_cpu_nobody_waits() -> None:
    with memory_turn("cpu"), memory_turn("cpu"):
        pass


@pytest.mark.parametrize(("num_gpus", "share"), [(0.0, 1.0), (0.7, 0.7), (1.0, 1.0), (2.0, 1.0)])
def test_a_replica_plans_with_its_share_of_the_gpu(num_gpus: float, share: float) -> None:
    config = AppConfig.model_validate({"generate": {"num_gpus": num_gpus}})
    assert config.generate.gpu_share == share
