"""How many threads the kernels use: what a thread has set, else PyTorch's; and how many are worth starting."""

import threading
from pathlib import Path

import pytest
import torch

from raylens.cpu_kernels import threads
from raylens.cpu_kernels.threads import num_threads, set_num_threads, usable_cores


def test_each_thread_has_a_number_of_its_own() -> None:
    found = []

    def ask(number: int) -> None:
        found.append(num_threads())
        set_num_threads(number)
        found.append(num_threads())

    for number in (7, 3):
        thread = threading.Thread(target=ask, args=(number,))
        thread.start()
        thread.join()
    assert found == [torch.get_num_threads(), 7, torch.get_num_threads(), 3]


@pytest.mark.parametrize(
    ("cores", "quota", "expected"),
    [
        (8, None, 8),
        (8, "max 100000", 8),
        (8, "250000 100000", 3),
        (8, "50000 100000", 1),
        (2, "400000 100000", 2),
        (64, None, 16),
        (8, "", 8),
    ],
)
def test_a_container_starts_as_many_as_it_has_time_for(
    cores: int, quota: str | None, expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n")
    monkeypatch.setattr(threads, "_QUOTA", file)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert usable_cores() == expected
