"""Ports of this machine for servers to come."""

import random
import socket
from contextlib import ExitStack, suppress

_LASTING_PORTS = range(20_000, 30_000)


def free_port() -> int:
    """Returns a TCP port that is free on all addresses, outside the ports of outgoing connections and replicas."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """The same for several different ports."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < number:
            port = random.choice(_LASTING_PORTS)
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("", port))
                found.append(port)
    return found
