"""CUDA graphs: records the kernels of a function and launches the whole record at once."""

from collections.abc import Callable
from typing import TypeVar

import torch

Outputs = TypeVar("Outputs")

# CUDA's error codes from cudaErrorStreamCaptureUnsupported to cudaErrorCaptureWrongThread.
_CAPTURE_CODES = range(900, 909)


class NotRecordableError(RuntimeError):
    """A computation runs but cannot be recorded, because it synchronizes with the host."""


class CudaCapture:
    """Records the work that functions launch on one device. All records share a memory pool, so only the latest
    replay's outputs are valid. Other threads may use the device meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        """The bytes that the device's allocator holds for the records."""

    def __call__(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """Returns a function that repeats the computation on the inputs' current content and writes to the same
        outputs.

        Raises NotRecordableError if the computation cannot be recorded. Passes on the computation's own errors, such as
        a lack of memory or a kernel that does not compile."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        # The outer stream context restores the current stream if recording fails halfway.
        with torch.cuda.device(self._device), torch.cuda.stream(current):
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(self._device)
            # The first call compiles kernels and allocates libraries' workspaces, which must not be recorded.
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()
            current.wait_stream(self._stream)
            try:
                # thread_local: the record leaves out other threads' work on the device.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    outputs = function()
            except RuntimeError as error:
                if is_about_recording(error):
                    raise NotRecordableError("the computation cannot be recorded as a CUDA graph") from error
                raise
            self.num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


def is_about_recording(error: BaseException) -> bool:
    """Returns whether an error was caused by recording itself.

    Ending a failed record raises another error, with the original error as its context."""
    first = error
    while isinstance(first.__context__, RuntimeError):
        first = first.__context__
    if isinstance(first, torch.OutOfMemoryError):
        return False
    if isinstance(first, torch.AcceleratorError):
        return getattr(first, "error_code", None) in _CAPTURE_CODES
    # PyTorch itself rejects some operations, e.g. copies from unpinned memory "during CUDA graph capture".
    return "captur" in str(first)
