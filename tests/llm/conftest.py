"""What tests of the language engine share."""

from collections.abc import Iterator

import pytest

from raylens.cpu_kernels.library import VARIABLE


@pytest.fixture(scope="module", params=["", "off"], ids=["kernels", "pytorch"])
def with_kernels_and_without(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a module's tests twice: with Raylens' kernels, and with PyTorch alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        yield
