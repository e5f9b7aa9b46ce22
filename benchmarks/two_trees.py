"""This tree of the project beside an older one, which benchmarks measure in turns."""

import argparse
import subprocess
from pathlib import Path

THIS_TREE = Path(__file__).resolve().parent.parent


def add_old_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--old", type=Path, help="a built tree of this project to compare with")


def trees_of(options: argparse.Namespace) -> dict[str, Path]:
    """Returns the tree of this file as `new` and, if there is one, that of the option as `old`."""
    return {"new": THIS_TREE} | ({} if options.old is None else {"old": options.old.resolve()})


def commit_of(tree: Path) -> str:
    return subprocess.check_output(["git", "-C", str(tree), "rev-parse", "HEAD"], text=True).strip()
