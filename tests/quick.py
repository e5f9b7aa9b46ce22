"""A pytest plugin, `-p tests.quick`: the tests of a change that start no process and take less than a second or so."""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

_STARTS_PROCESSES = re.compile(
    r"^import (subprocess|multiprocessing)$|"
    r"\b(app_url|client: OpenAI|ray_port|ray_session|local_ray|page_fixtures|ended_servers|on_both|running_serve)\b",
    re.MULTILINE,
)
"""In the source of a module of tests."""
_LONG = {"cluster", "dashboards", "planning"}
"""Folders whose tests take seconds each: hosts, Prometheus, simulations."""
_MATRICES = {"cpu_kernels", "encoder", "llm", "model_coverage", "modeling", "preprocess"}
"""Folders whose tests run for many families, dtypes and kernels. Only the first case of each test runs."""


def pytest_sessionstart() -> None:
    sys.addaudithook(_refuse_ray)


def _refuse_ray(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and "gcs_server" in str(arguments[1]):
        raise AssertionError("a test of `make quick` starts Ray: mark it with pytest.mark.long")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.is_dir():
        return True if collection_path.name in _LONG else None
    if collection_path.suffix != ".py":  # pytest asks about every file beside the tests
        return None
    return True if _STARTS_PROCESSES.search(collection_path.read_text()) else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not _MATRICES.isdisjoint(metafunc.definition.path.parts):
        vars(metafunc)["parametrize"] = _FirstCase(metafunc.parametrize)


class _FirstCase:
    """Takes the place of `parametrize`, so that the other cases are not even collected."""

    def __init__(self, parametrize: Callable[..., None]) -> None:
        self._parametrize = parametrize

    def __call__(self, names: object, values: Iterable[object], *, ids: object = None, **options: object) -> None:
        values = list(values)
        # A value with a mark may be for another run, as `slow`.
        first = next((index for index, value in enumerate(values) if not getattr(value, "marks", ())), 0)
        kept = slice(first, first + 1)
        if isinstance(ids, Iterable):
            ids = list(ids)[kept]
        self._parametrize(names, values[kept], ids=ids, **options)
