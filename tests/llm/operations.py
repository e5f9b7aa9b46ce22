"""Counts operations of PyTorch. On the CPU it shows what would cost most on a GPU."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

SENDING = frozenset({"lift_fresh"})
"""Make a tensor of numbers of the host: on a GPU each is a copy of its own."""
WAITING = frozenset({"_local_scalar_dense", "is_nonzero", "nonzero", "equal"})
"""Need a value of the device on the host, which waits until the device has done all that it was given before."""


class Operations(TorchDispatchMode):
    """Counts by name what runs in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
