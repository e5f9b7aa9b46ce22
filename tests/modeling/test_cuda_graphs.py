"""What is recorded reads its inputs anew each time."""

import threading

import pytest
import torch

from modeling.cuda_graphs import CudaCapture

pytestmark = pytest.mark.gpu


def test_a_replay_computes_from_what_its_inputs_hold_then() -> None:
    capture, inputs = CudaCapture(torch.device("cuda")), torch.ones(64, 64, device="cuda")
    replay = capture(lambda: inputs @ inputs + 1)
    assert capture.num_bytes > 0
    for value in (2.0, 3.0):
        inputs.fill_(value)
        torch.testing.assert_close(replay(), torch.full((64, 64), 64 * value**2 + 1, device="cuda"))


def test_what_cannot_be_recorded_leaves_the_gpu_usable() -> None:
    capture, inputs = CudaCapture(torch.device("cuda")), torch.ones(4, device="cuda")
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        capture(lambda: inputs * inputs.sum().item())
    assert torch.cuda.current_stream() == stream
    assert (inputs * 2).sum().item() == 8
    replay = capture(lambda: inputs * 2)
    assert replay().sum().item() == 8


def test_another_thread_computes_while_one_records() -> None:
    """As a language engine in the same process."""
    capture, inputs = CudaCapture(torch.device("cuda")), torch.ones(256, 256, device="cuda")
    is_done, sums = threading.Event(), []

    def compute() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            while not is_done.is_set():
                sums.append(torch.ones(1000, device="cuda").cpu().sum().item())

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        replays = [capture(lambda: inputs @ inputs) for _ in range(10)]
    finally:
        is_done.set()
        thread.join()
    assert all(replay()[0, 0].item() == 256 for replay in replays)
    assert set(sums) == {1000.0}
