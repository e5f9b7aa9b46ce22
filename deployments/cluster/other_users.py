"""Limits the connections of other users of this machine to the server's own ports.

Ray checks its token only after it has accepted a connection, so another user could exhaust the descriptors of the
server's processes. Linux reports the user at each end of a local connection (sock_diag(7)). A parent process may copy
its children's descriptors (pidfd_getfd(2)), and shutting down a copy ends the connection. Connections of root and of
other machines are not limited."""

import ctypes
import errno
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from raylens.deployments.cluster.server_processes import pids_of

logger = logging.getLogger(f"ray.serve.{__name__}")

MOST = 100
"""Connections of one user to one port. Raylens keeps those with the lowest inode numbers, about the oldest."""
_PERIOD_SECONDS = 0.1
_LEAST_OFTEN_SECONDS = 5.0  # a check may miss connections: the system's table changes while it is read
_COUNTERS = Path("/proc/net/snmp")
_LIBC = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438  # on every architecture; Python has no function for it
_ROOT = 0
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_ERROR, _DONE = 2, 3
_ESTABLISHED = 1
_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBBxI48x")
_ROW = struct.Struct("=4x H H 16s 16s 24x I I")
_RECEIVE_BYTES = 1 << 20
_IPV4_IN_IPV6 = bytes(10) + b"\xff\xff"

Address: TypeAlias = tuple[bytes, int]  # a host in network byte order (IPv4-mapped addresses as IPv4) and a port


class End(NamedTuple):
    """One end of an established connection."""

    local: Address
    remote: Address
    user: int
    inode: int


@contextmanager
def bounded_connections(folder: Path, public_port: int) -> Iterator[None]:
    """Limits connections to the server in `folder` while the block runs. HAProxy limits those to `public_port`."""
    over, told = threading.Event(), set[tuple[int, int]]()

    def watch() -> None:
        safe = -1  # up to so many accepted connections, no user can be over the bound
        due = 0.0
        while not over.wait(_PERIOD_SECONDS):
            try:
                # A check takes 3 ms, plus 2 ms for each 1,000 connections of the machine; the counter takes 0.05 ms.
                accepted, now = _accepted(), time.monotonic()
                if accepted > safe or now >= due:
                    due = now + _LEAST_OFTEN_SECONDS
                    safe = accepted + MOST - close_excess(folder, public_port, told)
            except OSError as error:
                logger.warning("connections of other users of this machine are not bounded: %s", error)
                return

    thread = threading.Thread(target=watch, name="other-users", daemon=True)
    if sys.platform == "linux":
        thread.start()
    try:
        yield
    finally:
        over.set()


def close_excess(folder: Path, public_port: int, told: set[tuple[int, int]]) -> int:
    """Closes other users' connections to the server in `folder` beyond `MOST` per user and port. Returns the most that
    a user has left to one port. `told`: the users and ports already logged. Raises OSError if this process lacks the
    permission."""
    found = _inodes(public_port)
    excess = {inode for inodes in found.values() for inode in sorted(inodes)[MOST:]}
    closed = {inode for pid in (pids_of(folder) if excess else ()) for inode in _shut_down(pid, excess)}
    for (user, port), inodes in found.items():
        if (user, port) not in told and not closed.isdisjoint(inodes):  # otherwise the port belongs to another program
            told.add((user, port))
            logger.warning("user %d has %d connections to port %d, the limit is %d", user, len(inodes), port, MOST)
    return min(MOST, max(map(len, found.values()), default=0))


def _accepted() -> int:
    """Returns how many TCP connections this network namespace has accepted so far."""
    names, values = (line.split() for line in _COUNTERS.read_text().splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("PassiveOpens")])


def _inodes(public_port: int) -> dict[tuple[int, int], list[int]]:
    """Returns the inodes of this user's ends by (other end's user, own port)."""
    ends = [end for family in (socket.AF_INET, socket.AF_INET6) for end in _established(family)]
    own = os.geteuid()
    users = {(end.remote, end.local): end.user for end in ends if end.user not in (_ROOT, own)}
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for end in ends:
        if end.user == own and end.local[1] != public_port and (user := users.get((end.local, end.remote))) is not None:
            found[user, end.local[1]].append(end.inode)
    return found


def _established(family: socket.AddressFamily) -> Iterator[End]:
    """Yields the ends of this network namespace's TCP connections. Raises OSError if the system refuses the query."""
    query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 1 << _ESTABLISHED)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(query), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + query)
        while True:
            messages, start = kernel.recv(_RECEIVE_BYTES), 0
            while start < len(messages):
                size, kind, *_ = _HEADER.unpack_from(messages, start)
                body = start + _HEADER.size
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    code = -struct.unpack_from("=i", messages, body)[0]
                    raise OSError(code, os.strerror(code))
                yield _end(family, *_ROW.unpack_from(messages, body))
                start += size


def _end(family: int, port: int, other_port: int, host: bytes, other_host: bytes, user: int, inode: int) -> End:
    def address(host: bytes, port: int) -> Address:
        return host[:4] if family == socket.AF_INET else host.removeprefix(_IPV4_IN_IPV6), socket.ntohs(port)

    return End(address(host, port), address(other_host, other_port), user, inode)


def _shut_down(pid: int, inodes: set[int]) -> set[int]:
    """Shuts down the process's sockets among `inodes`. Returns the inodes found."""
    found, links = set[int](), {f"socket:[{inode}]": inode for inode in inodes}
    with suppress(FileNotFoundError, ProcessLookupError):  # the process ends or closes one of them
        pidfd = os.pidfd_open(pid)
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(FileNotFoundError):
                    if (inode := links.get(os.readlink(entry.path))) is not None:
                        _shut_down_copy(pidfd, int(entry.name), inodes)
                        found.add(inode)
        finally:
            os.close(pidfd)
    return found


def _shut_down_copy(pidfd: int, number: int, inodes: set[int]) -> None:
    copy = _LIBC.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if copy < 0:
        if ctypes.get_errno() == errno.EBADF:  # closed meanwhile
            return
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=copy) as connection:
        if os.fstat(copy).st_ino in inodes:  # else another socket has the number by now
            with suppress(OSError):  # the other end closed first
                connection.shutdown(socket.SHUT_RDWR)
