"""The program by which Ray starts each worker on one machine.

    python start_worker.py --serialized-runtime-env-context=JSON --language=PYTHON default_worker.py ARGUMENTS

Ray 2.60: the raylet starts each worker by `ray/_private/workers/setup_worker.py`, which sets the variables of the
runtime environment and becomes `default_worker.py`. Both import all of Ray, a third of a second each.
Needed: fast starts. The server's template (`deployments/cluster/worker_template.py`), which has imported torch and Ray,
forks each worker with the variable `FORKED`. This program starts every other worker, and all without a template, as Ray
does. It imports the standard library only.
Test: `tests/deployments/ray_internals/test_start_worker.py` runs Ray's own program beside this one.
Way back: workers that Ray forks from a process with given imports (ray-project/ray#31915, closed)."""

import json
import os
import socket
import sys
from typing import Any, NoReturn

SOCKET_VARIABLE = "RAYLENS_WORKER_TEMPLATE"  # environment variable: the template's socket
FORKED = "RAYLENS_FORKED"  # environment variable of workers that the template forks
LENGTH_BYTES = 4
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def main() -> None:
    context, command = _parsed(sys.argv[1:])
    if not _is_plain(context):
        _start_by_ray(sys.argv[1:])
    for name, value in context.get("env_vars", {}).items():
        os.environ[name] = os.path.expandvars(value)
    if FORKED in os.environ and SOCKET_VARIABLE in os.environ and _fork(os.environ[SOCKET_VARIABLE], command):
        return
    os.execv(sys.executable, [sys.executable, *command])


def _parsed(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns Ray's description of the runtime environment, and Ray's program for a worker with its arguments."""
    texts = [argument.removeprefix(_CONTEXT) for argument in arguments if argument.startswith(_CONTEXT)]
    context: dict[str, Any] = json.loads(texts[0] or "{}") if texts else {}
    return context, [argument for argument in arguments if not argument.startswith((_CONTEXT, _LANGUAGE))]


def _is_plain(context: dict[str, Any]) -> bool:
    """Returns whether the runtime environment has nothing but variables."""
    others = {name for name, value in context.items() if value and name not in ("env_vars", "py_executable")}
    return not others and context.get("py_executable", sys.executable) == sys.executable


def _start_by_ray(arguments: list[str]) -> NoReturn:
    from ray._private.workers import __file__ as package

    program = os.path.join(os.path.dirname(package), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, program, *arguments])


def _fork(path: str, command: list[str]) -> bool:
    """Returns whether the template forked the worker, with this process's output and group, which Ray ends with it."""
    order = {"command": command, "environment": dict(os.environ), "group": os.getpgid(0)}
    body = json.dumps(order).encode()
    try:
        with socket.socket(socket.AF_UNIX) as template:
            template.connect(path)
            socket.send_fds(template, [len(body).to_bytes(LENGTH_BYTES, "big")], [1, 2])
            template.sendall(body)
            return bool(template.recv(1))
    except OSError:
        return False


if __name__ == "__main__":
    main()
