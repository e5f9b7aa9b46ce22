"""Processes that share a GPU plan its memory one after the other."""

import fcntl
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raylens.deployments import replica_start
from raylens.deployments.config import AppConfig
from raylens.deployments.stages import encode_stage, generate_stage
from raylens.deployments.stages import memory_turn as memory_turn_module
from raylens.deployments.stages.memory_turn import memory_turn, turn

HOLDER = """
import sys, time
from pathlib import Path
from raylens.deployments.stages.memory_turn import turn

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


def test_a_gpu_s_lock_has_its_name_wherever_a_process_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes may know one GPU by different numbers."""
    names = {0: "GPU-a", 1: "GPU-b"}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=names[device.index or 0])
    )
    monkeypatch.setattr(memory_turn_module, "session_folder", lambda: tmp_path)
    with memory_turn("cuda"), (tmp_path / "raylens-gpu-GPU-a.lock").open() as first:
        with pytest.raises(BlockingIOError):
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with memory_turn("cuda:1"):
            assert (tmp_path / "raylens-gpu-GPU-b.lock").exists()
    with (tmp_path / "raylens-gpu-GPU-a.lock").open() as first:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("placement", ["separate", "inline"])
async def test_a_replica_has_one_turn_for_all_that_it_loads(
    placement: str, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second turn within the first would wait for ever."""
    turns: list[str] = []

    @contextmanager
    def counted(device: str) -> Iterator[None]:
        turns.append(f"begin {device}")
        yield
        turns.append("end")

    # The watch would end this process, whose loop turns no more after the test.
    monkeypatch.setattr(replica_start, "end_when_stuck", lambda _: None)
    for module in (encode_stage, generate_stage):
        monkeypatch.setattr(module, "memory_turn", counted)
    replica = generate_stage.Generate(AppConfig.model_validate({"model": shapes, "encode": {"placement": placement}}))
    assert turns == ["begin cpu", "end"]
    replica._loop.close()
    if placement == "separate":
        encode_stage.Encode(AppConfig(model=shapes))._loop.close()
        assert turns == ["begin cpu", "end"] * 2


def test_on_the_cpu_nobody_waits() -> None:
    with memory_turn("cpu"), memory_turn("cpu"):
        pass


@pytest.mark.parametrize(("num_gpus", "share"), [(0.0, 1.0), (0.7, 0.7), (1.0, 1.0), (2.0, 1.0)])
def test_a_replica_plans_with_its_share_of_the_gpu(num_gpus: float, share: float) -> None:
    config = AppConfig.model_validate({"generate": {"num_gpus": num_gpus}})
    assert config.generate.gpu_share == share
