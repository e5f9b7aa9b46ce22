"""How does `raylens serve` end, whatever ends it?

    python -m benchmarks.server_endings [--cases PATTERN] [--output FILE]

Starts the bundled model again and again, and sends each server one signal: to the process, to its process group as
shells and `timeout` do, or to all of its processes as systemd does by default; while it is idle, while it loads, and
while eight clients read long streams. `container` is the server as the first process of a PID namespace. `raylet` and
`gcs_server` are killed without a signal to the server. Each case tells the seconds until none of the server's processes
is left, what was left after 60 s, whether the port is free, and how the streams ended.

PATTERN is a shell pattern of cases, such as `TERM * streams`. Other cases stay in FILE as they are. The last line is
one JSON document. On Linux; `container` needs root.
"""

import argparse
import json
import os
import signal
import sys
from collections import Counter
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.document import at_most, publish, save, this_machine
from tests.ended_servers import Streams, serving

SIGNALS = ("TERM", "INT", "HUP", "KILL")
TARGETS = ("process", "group", "all")
STATES = ("idle", "loading", "streams")
CASES = (
    *(f"{number} {target} {state}" for number in SIGNALS for target in TARGETS for state in STATES),
    *(f"{number} container {state}" for number in SIGNALS for state in STATES),
    *(f"KILL {name} {state}" for name in ("raylet", "gcs_server") for state in STATES),
)
NUM_STREAMS = 8
MOST_SECONDS = 60.0
TARGET_SECONDS = 15.0


def measure(case: str) -> dict[str, Any]:
    name, target, state = case.split()
    number = signal.Signals[f"SIG{name}"]
    with serving(in_container=target == "container") as server, ExitStack() as stack:
        streams = None
        if state == "loading":
            server.wait_for_line("loading")
        else:
            server.wait_for_line("curl ")
        if state == "streams":
            streams = stack.enter_context(Streams(server.url, NUM_STREAMS))
        if target in ("raylet", "gcs_server"):
            os.kill(server.pid_of(target), number)
        else:
            server.send(number, "process" if target == "container" else target)
        seconds = server.seconds_to_end(MOST_SECONDS)
        result: dict[str, Any] = {"seconds": round(seconds, 1), "left": len(server.pids())}
        result |= {"port_is_free": server.port_is_free()}
        server.end_left_overs()
        result |= {"status": server.process.wait()}
    return result | ({} if streams is None else {"streams": dict(Counter(streams.ends))})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", metavar="PATTERN", default="*", help="which cases (default: all)")
    parser.add_argument("--output", type=Path, help="also write the JSON document there")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.output is not None and options.output.exists():
        results = json.loads(options.output.read_text())["cases"]
    document: dict[str, Any] = {"checks": {}, "cases": results, "machine": this_machine()}
    for case in CASES:
        if fnmatch(case, options.cases):
            results[case] = measure(case)
            print(case, results[case], flush=True)
            document["checks"] = {
                "seconds until all processes have ended, most": at_most(
                    max(one["seconds"] for one in results.values()), TARGET_SECONDS
                ),
                "processes left": at_most(sum(one["left"] for one in results.values()), 0),
                "ports not free": at_most(sum(not one["port_is_free"] for one in results.values()), 0),
            }
            save(document, options.output)
    publish(document, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
