"""Imports every module of Raylens, and says which cannot be imported and why.

    python -m tests.import_everything

It shows what an environment lacks, such as one with the oldest supported versions, or with packages of its own."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator

import raylens

LEFT_OUT = ("raylens.__main__", "raylens.cpu_kernels.")
"""The command itself, and libraries that a compiler makes."""


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(raylens.__path__, "raylens."):
        if not found.name.startswith(LEFT_OUT):
            yield found.name


def failures(names: list[str]) -> Iterator[str]:
    """Yields a line for each module that cannot be imported. A missing package is told once."""
    told: set[str] = set()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            if reason not in told:
                yield f"{name}: {reason}"
            told.add(reason)


def main() -> int:
    names = list(modules())
    failed = list(failures(names))
    print(*failed, f"{len(names)} modules, {'all' if not failed else 'not all'} can be imported", sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
