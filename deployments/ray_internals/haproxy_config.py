"""Makes Ray Serve's configuration of HAProxy withstand hostile clients.

Ray 2.60: Ray Serve writes the configuration from a template and starts the program that `RAY_SERVE_HAPROXY_BINARY_PATH`
names. The configuration opens an admin socket to every user, and statistics on every address. It waits an hour for a
request's headers, cuts long answers when a server comes or goes, does not notice clients that leave before their answer
begins, and answers errors in HTML. Ray has no settings for most of these.
Needed: none of that. The named program is `raylens-haproxy` (`deployments/cluster/haproxy.py`), which rewrites the file
by this module and becomes HAProxy.
Test: `tests/deployments/test_haproxy.py` runs HAProxy with Ray's file. UnknownConfigurationError tells missing lines.
Way back: an operator's own configuration of HAProxy (ray-project/ray#62927, closed)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "# Rewritten by raylens-haproxy.\n"
PROGRAM_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Environment variable: the program that Ray Serve starts as HAProxy."""
HEADER_SECONDS = 10
BUFFER_BYTES = 65536
LONGEST_STREAM_SECONDS = 3600
"""A HAProxy that was replaced after a change of the servers behind it finishes its answers within this time."""
MAX_HEADERS = 2000
"""HAProxy refuses requests with more. The endpoint's own limit is far lower, with a refusal in OpenAI's form."""

_SECTION = re.compile(r"^(?=global|defaults|frontend|backend|listen)", re.MULTILINE)
_CONNECTIONS = re.compile(r"^    maxconn (\d+)$", re.MULTILINE)
_FDS_PER_CONNECTION = 2  # both sides
_OTHER_FDS = 512
_BROWSER = "{ req.hdr(accept) -m sub text/html }"
_NOBODYS_LOG = "    log 127.0.0.1:514 local0 info\n"  # Ray's default: datagrams to whoever listens there


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The most connections at one time: of all clients, and of one address (IPv6: one network of 64 bits). Above
    `crowded`, HAProxy closes each connection after its answer, so that idle connections make room."""

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
        return total * _FDS_PER_CONNECTION + _OTHER_FDS


class UnknownConfigurationError(RuntimeError):
    """Ray Serve writes a configuration that this module does not know."""


def rewrite(
    config: str, *, max_open_files: int, host: str | None, pages: Mapping[int, Path], waiting_page: Path
) -> str:
    """Returns the safe configuration. `max_open_files` bounds connections. `host`: the listen address instead of Ray's.
    `pages`: each status's error page. `waiting_page`: what a browser gets while no ingress is there. Raises
    UnknownConfigurationError if a line that must change is missing."""
    connections = _CONNECTIONS.search(config)
    limits = ConnectionLimits.within(int(connections[1]) if connections else 0, max_open_files)
    waiting = f'http-request return status 503 content-type "text/html; charset=utf-8" file {waiting_page}'
    sections = [_rewritten(one, limits, host, pages, waiting) for one in _SECTION.split(config)]
    names = [section.split("\n", 1)[0].split() for section in sections]
    for wanted in (["global"], ["defaults"], ["frontend", "http_frontend"], ["backend", "default_backend"]):
        if (count := names.count(wanted)) != 1:
            raise UnknownConfigurationError(f"{count} sections {' '.join(wanted)!r} in Ray's HAProxy file")
    return MARK + "".join(sections)


def _rewritten(
    section: str, limits: ConnectionLimits, host: str | None, pages: Mapping[int, Path], waiting: str
) -> str:
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
        # HAProxy 2.8 loses track of connections whose data it splices. Spliced requests hide a leaving client: HAProxy
        # polls without a pause, and the server works on. Spliced answers, if a server refuses a body and closes, leave
        # one of six clients hanging.
        section = _replace(section, r"^    option splice-request\n", "")
        section = _replace(section, r"^    option splice-response\n", "")
        lines = [f"errorfile {status} {file}" for status, file in pages.items()]
        return section + _indented([f"timeout http-request {HEADER_SECONDS}s", *lines])
    if name == "frontend http_frontend":
        if host is not None:
            section = _replace(section, r"^    bind \S+:(\d+)$", rf"    bind {host}:\1")
        head, bind, rest = re.split(r"(^    bind .*\n)", section, maxsplit=1, flags=re.MULTILINE)
        limiting = [
            "stick-table type ipv6 size 100k expire 60s store conn_cur",
            "tcp-request connection track-sc0 src,ipmask(32,64)",
            f"tcp-request connection reject if {{ sc0_conn_cur gt {limits.per_address} }}",
            f"http-after-response set-header Connection close if {{ fe_conn gt {limits.crowded} }}",
        ]
        return head + bind + _indented(limiting) + rest
    if name == "backend default_backend":  # no application runs
        rules = [f"{waiting} if {_BROWSER}", "http-request return status 503 default-errorfiles"]
        return "backend default_backend\n" + _indented(rules)
    if name.startswith("backend http-"):
        rule = f"{waiting} if {_BROWSER} {{ nbsrv({name.removeprefix('backend ')}) eq 0 }}"
        return section.replace("\n", "\n" + _indented([rule]), 1)
    return section


def _indented(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _replace(section: str, pattern: str, replacement: str) -> str:
    found, count = re.subn(pattern, replacement, section, flags=re.MULTILINE)
    if count != 1:
        raise UnknownConfigurationError(f"{count} lines like {pattern!r} in Ray's HAProxy file, not one")
    return found


def haproxy_variables(folder: Path, program: Path, max_connections: int) -> dict[str, str]:
    """Returns the environment by which Ray Serve starts `program` and keeps HAProxy's files in `folder`, a private
    folder of at most 40 characters: Ray adds 57, and HAProxy limits names of sockets to 97."""
    files = {
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "admin.sock",
        "METRICS_SOCKET_PATH": folder / "metrics.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "server-state",
    }
    return {
        PROGRAM_VARIABLE: str(program),
        "RAY_SERVE_HAPROXY_MAXCONN": str(max_connections),
        **{f"RAY_SERVE_HAPROXY_{name}": str(path) for name, path in files.items()},
    }
