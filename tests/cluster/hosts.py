"""Hosts on this machine: namespaces with a network, a file tree for what is their own, processes and sshd of their own.

Nothing of the machine itself is changed. The hosts share a bridge in the namespace of the first of them, from which
`ray up` and the clients run. Root, iproute2, openssh and rsync are needed."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

NETWORK = "10.77.0"
CONTROL = "ctl"
HOME = Path(pwd.getpwuid(0).pw_dir)
"""Of root, which each host has another of."""
_PROGRAMS = ("unshare", "nsenter", "ip", "/usr/sbin/sshd", "ssh-keygen", "rsync")
_START_SECONDS = 20.0


def missing() -> str | None:
    """Returns why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "only root may make namespaces"
    if absent := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"missing: {', '.join(absent)}"
    command = "ip link add br0 type bridge && ip link add v0 type veth peer name p0"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", command], capture_output=True, text=True, check=False)
    return f"the kernel forbids it: {tried.stderr.strip()}" if tried.returncode else None


class Host:
    """One host. `home`: the home of its root, as seen from outside."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.folder = folder / name
        self.home = self.folder / "root"
        self.environment: list[str] = []
        """Of commands, further variables."""
        self._unshare: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of its first process, as seen from outside."""
        assert self._unshare is not None, "started"
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        return int(children[0])

    def run(self, command: str, *, timeout: float = 120, check: bool = True) -> str:
        """Returns the output of a shell command on the host. A failure shows how far the command came."""
        try:
            done = subprocess.run(
                self.inside(command), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as late:
            told = [(one or b"").decode(errors="replace")[-4000:] for one in (late.stdout, late.stderr)]
            raise AssertionError(f"{self.name}: {command}: no end after {timeout:g} s\n" + "\n".join(told)) from None
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {command}\n{done.stdout}\n{done.stderr}")
        return done.stdout + done.stderr

    def inside(self, command: str) -> list[str]:
        """Returns the command line that runs a shell command on the host."""
        path = f"{HOME}/venv/bin:{os.defpath}:/usr/sbin:/sbin"
        environment = ["env", "-i", f"HOME={HOME}", f"PATH={path}", "LANG=C.UTF-8", "TERM=xterm", *self.environment]
        return ["nsenter", "-t", str(self.pid), "-a", "--", *environment, "bash", "-c", f"cd; {command}"]

    def start(self, public_key: str) -> None:
        """Also starts it again, with its old files."""
        (self.home / ".ssh").mkdir(parents=True, exist_ok=True)
        (self.folder / "tmp").mkdir(exist_ok=True)
        (self.folder / "tmp").chmod(0o1777)
        for private in (self.home, self.home / ".ssh"):
            private.chmod(0o700)
        (self.home / ".ssh" / "authorized_keys").write_text(public_key)
        (self.home / ".bashrc").touch()
        key = self.folder / "host_key"
        if not key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        for mark in ("is_ready", "has_network"):
            (self.folder / mark).unlink(missing_ok=True)
        init = self.folder / "init.sh"
        init.write_text(self._init(key))
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
        environment = {"PATH": f"{os.defpath}:/usr/sbin:/sbin", "HOME": str(HOME), "LANG": "C.UTF-8"}
        with (self.folder / "log").open("ab") as log:
            self._unshare = subprocess.Popen(
                ["unshare", *namespaces, "bash", str(init)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_for(self.folder / "is_ready")

    def connect(self) -> None:
        """Tells it that it has a network."""
        (self.folder / "has_network").touch()

    def power_off(self) -> None:
        """Ends all its processes at once. Its files stay."""
        if self._unshare is not None:
            with suppress(ProcessLookupError, IndexError, FileNotFoundError):
                os.kill(self.pid, signal.SIGKILL)
            self._unshare.wait(10)

    def _init(self, key: Path) -> str:
        own = {Path("/tmp"): self.folder / "tmp", HOME: self.home}
        shown = {Path(sys.base_prefix).resolve(), Path(__file__).parents[2], Path(sys.prefix).resolve()}
        places = [
            (path, mine / path.relative_to(hidden))
            for path in sorted(shown)
            for hidden, mine in own.items()
            if path.is_relative_to(hidden)
        ]
        binds = "".join(f"mkdir -p {place}; mount --bind {path} {place}\n" for path, place in places)
        binds += "".join(f"mount --rbind {mine} {hidden}\n" for hidden, mine in own.items())
        settings = (
            f"ListenAddress={self.address}",
            "PermitRootLogin=yes",
            "UsePAM=no",
            "PidFile=none",
            "StrictModes=no",
        )
        options = " ".join(f"-o {setting}" for setting in settings)
        return f"""set -e
mount --make-rprivate /
{binds}mount -t tmpfs -o size=4g tmpfs /dev/shm
mkdir -p /run/sshd
hostname {self.name}
ip link set lo up
touch {self.folder / "is_ready"}
until [ -e {self.folder / "has_network"} ]; do sleep 0.05; done
exec /usr/sbin/sshd -D -e -h {key} {options}
"""

    def _wait_for(self, file: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not file.exists():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)


def _on(where: Host, *command: str) -> None:
    subprocess.run(["nsenter", "-t", str(where.pid), "-n", *command], check=True)


@contextmanager
def running_hosts(names: Sequence[str], folder: Path) -> Iterator[list[Host]]:
    """Yields the hosts, the first of which is the one to work from; all of them end with the block. `folder` gets the
    key with which it enters the others: `id`."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id")], check=True)
    hosts = [Host(CONTROL, 1, folder), *(Host(name, 11 + number, folder) for number, name in enumerate(names))]
    with ExitStack() as stack:
        for host in hosts:
            stack.callback(host.power_off)
            power_on(hosts[0], host)
        yield hosts


def power_on(control: Host, host: Host) -> None:
    """Starts a host, and connects it to the network of the first one, `control`."""
    host.start((host.folder.parent / "id.pub").read_text())
    _plug_in(control, host)
    host.connect()


def silence(control: Host, host: Host) -> None:
    """Has all packets to and from a host vanish, as when it loses power: nobody is told that it has gone."""
    _on(control, "ip", "link", "set", f"v-{host.name}", "nomaster")


def _plug_in(control: Host, host: Host) -> None:
    """Connects a host to the bridge of the first one."""
    if host is control:
        _on(host, "ip", "link", "add", "br0", "type", "bridge")
        _on(host, "ip", "addr", "add", f"{host.address}/24", "dev", "br0")
        _on(host, "ip", "link", "set", "br0", "up")
        return
    _on(control, "ip", "link", "add", f"v-{host.name}", "type", "veth", "peer", "name", f"p-{host.name}")
    _on(control, "ip", "link", "set", f"v-{host.name}", "master", "br0", "up")
    _on(control, "ip", "link", "set", f"p-{host.name}", "netns", str(host.pid))
    _on(host, "ip", "link", "set", f"p-{host.name}", "name", "eth0")
    _on(host, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    _on(host, "ip", "link", "set", "eth0", "up")
