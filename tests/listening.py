"""The sockets on which the processes of a server listen, and what another user may do."""

import ipaddress
import os
import re
import select
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.replicas import parent, worker_pids

_DOCUMENT = Path(__file__).parent.parent / "docs" / "security.md"
_LISTEN = "0A"
NOBODY = 65534


@dataclass(frozen=True, order=True)
class Listener:
    """`process`: its title, or its program's name. `address`: "loopback", "every address" or the address itself."""

    process: str
    address: str
    port: int

    def is_like(self, pattern: str, address: str) -> bool:
        return fnmatch(self.process, pattern) and self.address == address


def listeners(root: int) -> list[Listener]:
    """Where the process `root` and all that descend from it listen for TCP connections."""
    owners = {inode: title for pid in _family(root) for inode, title in _socket_owners(pid).items()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in owners:
                address, _, port = fields[1].partition(":")
                found.append(Listener(owners[fields[9]], _where(address), int(port, 16)))
    return sorted(found)


def undocumented(found: list[Listener]) -> list[Listener]:
    """Those of which docs/security.md says nothing."""
    known = documented()
    return [one for one in found if not any(one.is_like(*entry) for entry in known)]


def sockets_open_to_nobody() -> list[str]:
    """Names of the server's sockets, in files, that the user `nobody` may connect to. Only root may ask."""
    files = [file for file in server_folder().rglob("*") if file.is_socket()]
    assert {file.name for file in files} >= {"admin.sock", "raylet", "plasma_store"}
    return [file.name for file in files if not _is_refused(file)]


def _is_refused(file: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return is_refused_to_nobody(lambda: connection.connect(str(file)))


def documented() -> list[tuple[str, str]]:
    """Pattern of a process and its address, of the table in docs/security.md."""
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", _DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) > 5
    return [
        (pattern, {"`--host`": "loopback"}.get(address, address))
        for patterns, address in rows
        for pattern in re.findall(r"`([^`]+)`", patterns)
    ]


def server_folder(driver: int | None = None) -> Path:
    """Of the server that the process `driver`, by default this one, runs."""
    (pid,) = worker_pids("ServeController", driver)
    found = re.search(r"/tmp/raylens-[^/\0]+", Path(f"/proc/{pid}/environ").read_text())
    assert found is not None
    return Path(found.group())


def become_nobody() -> None:
    """Makes this process the user `nobody`'s. Only root may."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def is_refused_to_nobody(act: Callable[[], object]) -> bool:
    """Whether the user `nobody` is not permitted to do it, in a process of his own. Only root may ask."""
    child = os.fork()
    if child == 0:
        status = 0
        try:
            become_nobody()
            act()
        except PermissionError:
            status = 13
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13


@contextmanager
def connections_of_nobody(ports: Sequence[int]) -> Iterator[Callable[[], int]]:
    """Connections of the user `nobody`. Yields a function that returns how many the server has closed. Only root may
    ask."""
    closed, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become_nobody()
            connections = [socket.create_connection(("127.0.0.1", port)) for port in ports]
            os.write(told, b"+")
            ended = select.poll()
            for connection in connections:
                ended.register(connection, select.POLLIN)
            while True:
                for descriptor, _ in ended.poll():
                    ended.unregister(descriptor)
                    os.write(told, b"-")
        finally:
            os._exit(0)
    os.close(told)
    assert os.read(closed, 1) == b"+"
    os.set_blocking(closed, False)
    num_closed = 0

    def count() -> int:
        nonlocal num_closed
        with suppress(BlockingIOError):
            num_closed += len(os.read(closed, len(ports)))
        return num_closed

    try:
        yield count
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(closed)


def _family(root: int) -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = parent(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
    family, grown = {root}, {root}
    while grown:
        grown = {pid for pid, its_parent in parents.items() if its_parent in grown}
        family |= grown
    return family


def _socket_owners(pid: int) -> dict[str, str]:
    """The process's title for each of its sockets' inodes; empty once it has ended."""
    links = []
    try:
        title = _title(pid)
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has been closed meanwhile
                links.append(os.readlink(file))
    except OSError:
        return {}
    return {link.removeprefix("socket:[").rstrip("]"): title for link in links if link.startswith("socket:[")}


def _title(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if not words[0].startswith("ray::"):
        return Path(words[0]).name
    # While an actor runs a method, Ray adds ".method" to its title.
    return words[0].strip().partition(".")[0]


def _where(address: str) -> str:
    raw = bytes.fromhex(address)
    whole = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    found = ipaddress.ip_address(socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, whole))
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback:
        return "loopback"
    return "every address" if found.is_unspecified else str(found)
