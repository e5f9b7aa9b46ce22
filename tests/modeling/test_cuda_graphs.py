"""What is recorded reads its inputs anew each time. What cannot be recorded is told apart from what fails anyway."""

import threading

import pytest
import torch

from raylens.modeling.cuda_graphs import CudaCapture, NotRecordableError, is_about_recording


def cuda_error(code: int, message: str) -> torch.AcceleratorError:
    """As PyTorch makes it of an error of CUDA."""
    error = torch.AcceleratorError(f"CUDA error: {message}")
    error.error_code = code  # type: ignore[attr-defined]
    return error


UNSUPPORTED = cuda_error(900, "operation not permitted when stream is capturing")
UNPINNED = RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless it is pinned")


@pytest.mark.parametrize("error", [UNSUPPORTED, cuda_error(908, "wrong thread"), UNPINNED])
def test_a_wait_in_the_middle_is_about_recording(error: RuntimeError) -> None:
    assert is_about_recording(error)
    assert is_about_recording(at_the_end_of_the_record(error))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory; private pools of CUDA graph captures hold 1 GiB"),
        cuda_error(700, "an illegal memory access was encountered"),
        cuda_error(700, "an illegal memory access was encountered while a stream was capturing"),
        cuda_error(709, "context is destroyed"),
        torch.AcceleratorError("without a code"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    ],
)
def test_what_fails_by_itself_is_not_about_recording(error: RuntimeError) -> None:
    assert not is_about_recording(error)
    assert not is_about_recording(at_the_end_of_the_record(error))


def at_the_end_of_the_record(first: RuntimeError) -> BaseException:
    """The error that the record's end raises in place of the one that broke it."""
    end = cuda_error(901, "operation failed due to a previous error during capture")
    end.__context__ = first
    return end


@pytest.mark.gpu
def test_a_replay_computes_from_what_its_inputs_hold_then() -> None:
    capture, inputs = CudaCapture(torch.device("cuda")), torch.ones(64, 64, device="cuda")
    replay = capture(lambda: inputs @ inputs + 1)
    assert capture.num_bytes > 0
    for value in (2.0, 3.0):
        inputs.fill_(value)
        torch.testing.assert_close(replay(), torch.full((64, 64), 64 * value**2 + 1, device="cuda"))


@pytest.mark.gpu
def test_what_cannot_be_recorded_leaves_the_gpu_usable() -> None:
    capture, inputs = CudaCapture(torch.device("cuda")), torch.ones(4, device="cuda")
    stream = torch.cuda.current_stream()
    with pytest.raises(NotRecordableError):
        capture(lambda: inputs * inputs.sum().item())
    assert torch.cuda.current_stream() == stream
    assert (inputs * 2).sum().item() == 8
    replay = capture(lambda: inputs * 2)
    assert replay().sum().item() == 8


@pytest.mark.gpu
def test_memory_that_is_not_there_is_no_matter_of_recording() -> None:
    capture, is_recording = CudaCapture(torch.device("cuda")), [False, True]
    with pytest.raises(torch.OutOfMemoryError):
        capture(lambda: torch.empty(2**50 if is_recording.pop(0) else 1, device="cuda"))


@pytest.mark.gpu
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
