"""Counts operations of PyTorch. On the CPU it shows what would cost most on a GPU."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SENDING = frozenset({"lift_fresh"})
"""Make a tensor of numbers of the host: on a GPU each is a copy of its own."""
WAITING = frozenset({"_local_scalar_dense", "is_nonzero", "nonzero", "equal"})
"""Need a value of the device on the host, which waits until the device has done all that it was given before."""


READING = frozenset({"tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"})
"""Methods of a tensor that give its content to the host."""


def noted(events: list[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that does what `call` does, and notes that it is called."""

    def noting(*given: Any) -> Any:
        events.append(name)
        return call(*given)

    return noting


class HostReads(TorchFunctionMode):
    """Notes in `events` where the block reads a tensor on the host, by the method's name."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING and getattr(torch.Tensor, name, None) is func:
            self.events.append(name)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts by name what runs in the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
