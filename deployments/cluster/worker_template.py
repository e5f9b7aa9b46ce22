"""A process that has imported torch, Ray and the replicas' other libraries, and forks workers.

These imports take Preprocess, Encode and Generate four seconds of a core each, and the other replicas two. On one
machine, `raylens serve` starts this process beside Ray: the imports are done when the replicas start, which share the
memory. Ray is imported last, with the variables of the first worker. torch starts threads and looks for GPUs after its
import: only replicas without a GPU are forked."""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from raylens.deployments.cluster.ray_session import signals_later
from raylens.deployments.ray_internals.ray_before_fork import RayBeforeFork
from raylens.deployments.ray_internals.start_worker import LENGTH_BYTES, SOCKET_VARIABLE
from raylens.deployments.stages.process_setup import MALLOC_VARIABLES, prepare_torch

NUM_THREADS = 1  # CPUs of a forked stage; the libraries read their number of threads at import
_MODULES = (
    *("raylens.preprocess.processor", "raylens.encoder.engine", "raylens.llm.engine", "raylens.deployments.config"),
    *("fastapi", "google.protobuf.message", "grpc.aio", "jsonschema", "prometheus_client", "requests"),  # for Ray
)


@contextmanager
def worker_template(folder: Path) -> Iterator[dict[str, str]]:
    """Runs the template while the block runs. Yields the environment variables for `start_worker`."""
    path = folder / "worker-template.sock"
    variables = {"OMP_NUM_THREADS": str(NUM_THREADS), **MALLOC_VARIABLES}
    command = [sys.executable, "-P", "-m", "raylens.deployments.cluster.worker_template", str(path)]
    with ExitStack() as stack:
        # An exception inside Popen would leave an orphan.
        with signals_later():
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | variables, process_group=0)
            )
            stack.callback(process.kill)
        yield {SOCKET_VARIABLE: str(path)}


def main() -> None:
    """Imports all modules, then forks a worker per connection to the socket `argv[1]`. Ends with standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # `raylens serve` ends it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # avoids zombies
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(sys.argv[1])
        server.listen()
        prepare_torch()
        for module in _MODULES:
            importlib.import_module(module)
        ray = RayBeforeFork()
        while server in select.select([server, sys.stdin], [], [])[0]:
            _serve(server, ray)


def _serve(server: socket.socket, ray: RayBeforeFork) -> None:
    """Forks the worker of the next connection. In the worker, raises the worker's exit or error, which ends it."""
    with server.accept()[0] as connection:
        try:
            # An order of `start_worker`, with its standard output and error.
            length, files, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 2)
            with connection.makefile("rb") as body:
                order = json.loads(body.read(int.from_bytes(length, "big")))
        except (OSError, ValueError):  # the client ended meanwhile
            return
        if ray.fits(order["environment"]) and os.fork() == 0:
            server.close()
            os.setpgid(0, order["group"])
            connection.sendall(b"1")
            connection.close()
            _work(order["command"], order["environment"], files)
    for file in files:
        os.close(file)


def _work(command: list[str], environment: dict[str, str], output: list[int]) -> NoReturn:
    """Becomes the worker: runs Ray's worker program, `command`."""
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *output]):
        os.dup2(file, number)
        os.close(file)
    for signum in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    raise SystemExit


if __name__ == "__main__":
    main()
