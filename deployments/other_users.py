"""Bounds the connections that other users of this machine keep to the server's own ports.

Ray accepts any number of connections at its ports, and asks for its token only afterwards. So another user could fill
the descriptors of the server's processes. Linux tells which user is at each end of a connection within the machine
(proc(5), `/proc/net/tcp`). The process that started the others may copy their descriptors (pidfd_getfd(2)). Shutting a
connection down through a copy ends it for its owner, too. Root's connections and those of other machines are not
bounded."""

import ctypes
import errno
import logging
import os
import re
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from deployments.server_processes import pids_of

logger = logging.getLogger(f"ray.serve.{__name__}")

MOST = 100
"""Connections of one user to one port. Those with the lowest inode numbers stay, which are about the oldest."""
_PERIOD_SECONDS = 1.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438  # on every architecture; Python has no function for it
_ROOT = 0
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_IPV4_IN_IPV6 = b"0000000000000000FFFF0000"

Address: TypeAlias = tuple[bytes, int]
"""A host as `/proc/net/tcp` has it, IPv4 in IPv6 as IPv4, and a port."""


@contextmanager
def bounded_connections(folder: Path, public_port: int) -> Iterator[None]:
    """Bounds the connections to the processes of the server in `folder` while the block runs, but for those to
    `public_port`, which are HAProxy's to bound."""
    over, told = threading.Event(), set[tuple[int, int]]()

    def watch() -> None:
        while not over.wait(_PERIOD_SECONDS):
            try:
                close_excess(folder, public_port, told)
            except OSError as error:
                logger.warning("connections of other users of this machine are not bounded: %s", error)
                return

    thread = threading.Thread(target=watch, name="other-users", daemon=True)
    if _TABLES[0].exists():
        thread.start()
    try:
        yield
    finally:
        over.set()


def close_excess(folder: Path, public_port: int, told: set[tuple[int, int]]) -> None:
    """Closes connections of each other user to each port of the server in `folder`, beyond `MOST`. `told`: the users
    and ports that the log has already. Raises OSError where this process may not."""
    excess = set[int]()
    for (user, port), inodes in _many_inodes(public_port).items():
        excess.update(sorted(inodes)[MOST:])
        if (user, port) not in told:
            told.add((user, port))
            message = "user %d has opened %d connections to port %d, the limit is %d"
            logger.warning(message, user, len(inodes), port, MOST)
    if excess:
        for pid in pids_of(folder):
            _shut_down(pid, excess)


def _many_inodes(public_port: int) -> dict[tuple[int, int], list[int]]:
    """Returns the inodes of this user's ends of connections, by the other end's user and this end's port, where they
    are more than `MOST`."""
    tables = [table.read_bytes() for table in _TABLES if table.exists()]
    # One pass over thousands of rows is enough as long as nobody has too many.
    of_others = _connections(tables, f"(?!(?:{os.geteuid()}|{_ROOT}) )")
    counts = Counter((user, remote[1]) for _, remote, user, _ in of_others)
    if not any(number > MOST and port != public_port for (_, port), number in counts.items()):
        return {}
    users = {(remote, local): user for local, remote, user, _ in of_others if remote[1] != public_port}
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for local, remote, _, inode in _connections(tables, f"(?={os.geteuid()} )"):
        if (user := users.get((local, remote))) is not None:
            found[user, local[1]].append(inode)
    return {one: inodes for one, inodes in found.items() if len(inodes) > MOST}


def _connections(tables: Iterable[bytes], of_user: str) -> list[tuple[Address, Address, int, int]]:
    """Returns each end of an established connection whose user the pattern names: its own address, the other end's, the
    user and the inode."""
    row = rf"^ *\d+: (\w+):(\w+) (\w+):(\w+) 01 \S+ \S+ \S+ +{of_user}(\d+) +\d+ (\d+)"
    return [
        (_address(host, port), _address(other_host, other_port), int(user), int(inode))
        for table in tables
        for host, port, other_host, other_port, user, inode in re.findall(row.encode(), table, re.MULTILINE)
    ]


def _address(host: bytes, port: bytes) -> Address:
    return host.removeprefix(_IPV4_IN_IPV6), int(port, 16)


def _shut_down(pid: int, inodes: set[int]) -> None:
    """Shuts down the process' sockets with these inodes."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it ends, or closes one of them
        pidfd = os.pidfd_open(pid)
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(FileNotFoundError):
                    if _inode(os.readlink(entry.path)) in inodes:
                        _shut_down_copy(pidfd, int(entry.name), inodes)
        finally:
            os.close(pidfd)


def _inode(link: str) -> int | None:
    return int(link[len("socket:[") : -1]) if link.startswith("socket:[") else None


def _shut_down_copy(pidfd: int, number: int, inodes: set[int]) -> None:
    copy = _LIBC.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if copy < 0:
        if ctypes.get_errno() == errno.EBADF:  # it has been closed meanwhile
            return
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=copy) as connection:
        if os.fstat(copy).st_ino in inodes:  # else the number is another socket's by now
            with suppress(OSError):  # the other end was faster
                connection.shutdown(socket.SHUT_RDWR)
