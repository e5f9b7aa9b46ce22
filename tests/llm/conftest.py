"""What tests of the language engine share."""

from collections.abc import Iterator

import pytest

from raylens.cpu_kernels.library import VARIABLE

KERNELS = ("", "off")
IDS = ("kernels", "pytorch")


@pytest.fixture(params=KERNELS, ids=IDS)
def with_kernels_and_without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: with Raylens' kernels, and with PyTorch alone."""
    monkeypatch.setenv(VARIABLE, request.param)


@pytest.fixture(params=["", pytest.param("off", marks=pytest.mark.slow)], ids=IDS)
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with Raylens' kernels, and of the slow tests also with PyTorch alone."""
    monkeypatch.setenv(VARIABLE, request.param)


@pytest.fixture(scope="module", params=KERNELS, ids=IDS)
def module_with_kernels_and_without(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a module twice. Hypothesis refuses fixtures of a single test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        yield
