"""CUDA graphs: records the kernels that the host would launch one by one, and starts the whole record at once."""

from collections.abc import Callable
from typing import TypeVar

import torch

Outputs = TypeVar("Outputs")


class CudaCapture:
    """Records what functions launch on one device. All records share one pool of memory, so only the latest replay's
    outputs are valid. Another thread may use the device meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        """The bytes that the device's allocator holds for what is recorded."""

    def __call__(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """Returns a function that repeats the computation on the inputs' present content and writes into the same
        outputs.

        Raises RuntimeError if it cannot be recorded, for example because the host decides something in the middle of
        it.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        # The outer stream context puts back the current stream where recording fails halfway.
        with torch.cuda.device(self._device), torch.cuda.stream(current):
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(self._device)
            # What is made at the first call only, compiled kernels and libraries' workspaces, must not be recorded.
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()
            current.wait_stream(self._stream)
            # What other threads do on the device is none of this record's.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                outputs = function()
            self.num_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay
