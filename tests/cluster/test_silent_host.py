"""A host whose packets vanish is given up within seconds, though nobody says that it has gone."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from raylens.deployments.ray_internals.environment import RAY_ENVIRONMENT
from tests.cluster.hosts import Host, missing, running_hosts, silence

ROOT = Path(__file__).parents[2]
REASON = missing()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=REASON or "")]

LOST_SECONDS = 6.0
GIVEN_UP_SECONDS = 7.5
LISTENS = """
import asyncio, base64, sys
from raylens.deployments.wire import private_port
from raylens.deployments.wire.private_port import PrivatePort

private_port.get_node_ip_address = lambda: sys.argv[1]

async def listen(reader, writer):
    while await reader.read(65536):
        pass

async def main():
    port = PrivatePort(listen)
    await port.open()
    print(port.address.port, base64.b64encode(port.address.token).decode(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
CONNECTS = """
import asyncio, base64, sys
from contextlib import suppress
from raylens.deployments.wire.private_port import PortAddress, connect

async def main(host, port, token, sends):
    reader, writer = await connect(PortAddress(host, int(port), base64.b64decode(token)))
    print("connected", flush=True)

    async def send():
        while sends == "sends":
            writer.write(b"x")
            await asyncio.sleep(0.05)

    asyncio.ensure_future(send())
    with suppress(OSError):
        await reader.read()
    print("lost", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
NOTICES = """
import ray, time
from raylens.deployments.cluster.ray_session import joined_cluster

def wait_for(number):
    while sum(node["Alive"] for node in ray.nodes()) != number:
        time.sleep(0.05)
    print(number, flush=True)

with joined_cluster():
    wait_for(2)
    wait_for(1)
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with (
        tempfile.TemporaryDirectory(prefix="raylens-silent-", dir="/var/tmp") as folder,
        running_hosts(["h1", "h2"], Path(folder)) as found,
    ):
        yield found


def started(host: Host, script: str, *arguments: str) -> "subprocess.Popen[str]":
    command = ["nsenter", "-t", str(host.pid), "-n", "--", sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.timeout(120)
def test_a_private_connection_fails_whether_it_is_idle_or_sends(hosts: list[Host]) -> None:
    control, here, there = hosts
    with ExitStack() as stack:
        listening = stack.enter_context(started(there, LISTENS, there.address))
        stack.callback(listening.kill)
        where = (there.address, *line_of(listening).split())
        connected = {kind: stack.enter_context(started(here, CONNECTS, *where, kind)) for kind in ("idle", "sends")}
        for process in connected.values():
            stack.callback(process.kill)
            assert line_of(process) == "connected"
        time.sleep(1)
        silence(control, there)
        silent_at = time.monotonic()
        seconds = {}
        for kind, process in sorted(connected.items()):
            assert line_of(process) == "lost"
            seconds[kind] = time.monotonic() - silent_at
    assert all(LOST_SECONDS - 2 < one < LOST_SECONDS + 2 for one in seconds.values()), seconds


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ray_gives_a_silent_host_up(hosts: list[Host]) -> None:
    control, head, worker = hosts
    settings = [f"{name}={value}" for name, value in RAY_ENVIRONMENT.items()]
    ray = f"{sys.executable} -m ray.scripts.scripts start --num-cpus=1 --object-store-memory=100000000"
    for host, role in ((head, "--head --include-dashboard=false"), (worker, f"--address={head.address}:6379")):
        host.environment += [*settings, "RAY_AUTH_MODE=disabled"]
        host.run(f"{ray} {role} --node-ip-address={host.address}", timeout=90)
    notices = subprocess.Popen(head.inside(f"{sys.executable} -c '{NOTICES}'"), stdout=subprocess.PIPE, text=True)
    with notices:
        assert line_of(notices) == "2"
        time.sleep(6)  # Ray tries a node for the first time five seconds after it has joined
        silence(control, worker)
        silent_at = time.monotonic()
        while line_of(notices) != "1":  # Ray says something itself
            assert notices.poll() is None
        seconds = time.monotonic() - silent_at
        notices.kill()
    assert GIVEN_UP_SECONDS - 1.5 < seconds < GIVEN_UP_SECONDS + 2, seconds
