"""What the event loop of a replica of Generate takes from its engine's thread, which shares the interpreter with it.

    git worktree add --detach OLD COMMIT      a tree to compare with
    python -m benchmarks.engine_thread [--old OLD] [--intervals SECONDS ...] [--rounds 3] [--output FILE]

The engine is a stand-in for one on a GPU (`benchmarks/engine_replica.py`): a step launches ten operations of torch,
waits 4 ms without the interpreter, and gives each stream a token. `1 wait` is one wait behind the launches, as for a
step that is launched as a whole; `10 waits` has a tenth of it behind each launch, so that the thread asks for the
interpreter all the time. All else is the real stage, outside of Ray: Generate, its engine's thread, the text of each
token, and the connection to an ingress, another process, which proves that every answer has come whole and in order.

`new` is the tree of this file, `old` that of `--old`, each in a process of its own. `new, SECONDS` is the new tree with
another switch interval of the interpreter, for each of `--intervals`. In each round all sides measure each case in
turns, and the order changes from round to round: first alone, where the step's outputs go nowhere, then with streams.

Figures are medians of all rounds. `cycle_ms` is the time from the beginning of a step to that of the next, its median
and its 99th percentile, `alone_ms` the same alone, and `ratio` that of both medians. `loop_us` is the processor time of
the event loop's thread for a token, `loop_ms` that for a step. A loop whose `loop_ms` is longer than a step falls
behind: then a piece has more than one token. The last line is one JSON document.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import at_most, publish, this_machine
from benchmarks.two_trees import add_old_option, commit_of, trees_of

STREAMS, WAITS = (64, 256), (1, 10)
WAIT_SECONDS = 0.004
MOST_RATIO = 1.15
_STEPS = 150
_END_SECONDS = 20.0

Figures = dict[str, float]
Replica = subprocess.Popen[str]


@dataclass(frozen=True, slots=True)
class Side:
    """A replica, and the switch interval that it measures with, in seconds, None for its own."""

    replica: Replica
    interval: float | None = None

    def measure(self, num_streams: int, num_waits: int) -> Figures:
        alone, served = (self._ask(num_streams, num_waits, is_alone=is_alone) for is_alone in (True, False))
        (alone_ms, alone_p99), (cycle_ms, cycle_p99) = _percentiles(alone), _percentiles(served)
        return {
            "alone_ms": alone_ms,
            "alone_ms_p99": alone_p99,
            "cycle_ms": cycle_ms,
            "cycle_ms_p99": cycle_p99,
            "ratio": cycle_ms / alone_ms,
            "loop_us": served["loop_us"],
            "loop_ms": served["loop_us"] * num_streams / 1e3,
            "tokens_per_piece": served["tokens_per_piece"],
            "tokens_per_message": served["tokens_per_message"],
        }

    def _ask(self, num_streams: int, num_waits: int, *, is_alone: bool) -> dict[str, Any]:
        """Returns the fields of `benchmarks.engine_replica.Measured`."""
        asked = {
            "num_streams": num_streams,
            "num_steps": _STEPS,
            "wait_s": WAIT_SECONDS,
            "num_waits": num_waits,
            "is_alone": is_alone,
            "switch_interval": self.interval,
        }
        assert self.replica.stdin is not None
        assert self.replica.stdout is not None
        self.replica.stdin.write(json.dumps(asked) + "\n")
        self.replica.stdin.flush()
        answer: dict[str, Any] = json.loads(self.replica.stdout.readline())
        return answer


def _percentiles(measured: dict[str, Any]) -> tuple[float, float]:
    """Returns the median and the 99th percentile."""
    values = statistics.quantiles(measured["cycles_ms"], n=100)
    return values[49], values[98]


@contextmanager
def running_replica(tree: Path) -> Iterator[Replica]:
    """Runs a replica with the code of `tree`, by this tree's `benchmarks/engine_replica.py`."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("engine_replica.py"))]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tree, env=environment, stdin=pipe, stdout=pipe, text=True) as replica:
        try:
            yield replica
            assert replica.stdin is not None
            replica.stdin.close()
            replica.wait(_END_SECONDS)
        finally:
            replica.kill()


def measure(sides: dict[str, Side], rounds: int) -> dict[str, dict[str, Figures]]:
    """Returns the medians, by case and side."""
    measured: dict[str, dict[str, list[Figures]]] = {}
    for turn in range(rounds):
        for num_streams in STREAMS:
            for num_waits in WAITS:
                case = measured.setdefault(f"{num_streams} streams, {num_waits} wait{'s' * (num_waits > 1)}", {})
                for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                    case.setdefault(name, []).append(sides[name].measure(num_streams, num_waits))
    return {
        case: {
            name: {key: round(statistics.median(one[key] for one in own), 3) for key in own[0]}
            for name, own in sorted(by_side.items())
        }
        for case, by_side in measured.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_old_option(parser)
    parser.add_argument("--intervals", type=float, nargs="*", default=[], help="other switch intervals, in seconds")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    paths = trees_of(options)
    with ExitStack() as stack:
        sides = {name: Side(stack.enter_context(running_replica(path))) for name, path in paths.items()}
        for interval in options.intervals:
            sides[f"new, {interval:g} s"] = Side(sides["new"].replica, interval)
        measured = measure(sides, options.rounds)
    for case, by_side in measured.items():
        for name, figures in by_side.items():
            print(f"{case:20} {name:14} {figures}")
    document = {
        "checks": {
            f"step over alone, {case}": at_most(own["new"]["ratio"], MOST_RATIO) for case, own in measured.items()
        },
        "measured": measured,
        "commits": {name: commit_of(path) for name, path in paths.items()},
        "machine": this_machine(wait_seconds=WAIT_SECONDS, python=sys.version.split()[0]),
    }
    publish(document, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
