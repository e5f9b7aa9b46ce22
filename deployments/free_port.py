"""Ports of this machine for servers to come."""

import random
import socket
from collections import deque
from contextlib import ExitStack, suppress

_LASTING_PORTS = range(20_000, 30_000)
_recent: deque[int] = deque(maxlen=1000)
"""Ports that this process has given, whose servers may not have started yet."""


def free_port() -> int:
    """Returns a TCP port that is free on all addresses, outside the ports of outgoing connections and replicas, and
    that it has not returned lately."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """The same for several different ports."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < number:
            port = random.choice(_LASTING_PORTS)
            if port in _recent:
                continue
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("", port))
                found.append(port)
                _recent.append(port)
    return found
