"""What tests of the language engine share."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from raylens.cpu_kernels.library import VARIABLE


@pytest.fixture(scope="module", params=["", "off"], ids=["kernels", "pytorch"])
def with_kernels_and_without(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a module's tests twice: with Raylens' kernels, and with PyTorch alone."""
    with _kernels(request.param):
        yield


@pytest.fixture(scope="module", params=["", pytest.param("off", marks=pytest.mark.slow)], ids=["kernels", "pytorch"])
def with_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a test with Raylens' kernels, and of the slow tests also with PyTorch alone."""
    with _kernels(request.param):
        yield


@contextmanager
def _kernels(choice: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, choice)
        yield
