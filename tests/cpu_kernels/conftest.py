"""The kernels' tests run with each library that runs on this processor."""

import os
from pathlib import Path

import pytest

import raylens.cpu_kernels.library
from raylens.cpu_kernels.library import BUILDS, KernelLibrary, _usable_builds

SANITIZED = "RAYLENS_SANITIZED_KERNELS"
"""The environment variable with the folder of the libraries to test. Without it the tests use those of the package."""


@pytest.fixture(params=BUILDS)
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    build: str = request.param
    if build not in _usable_builds():
        pytest.skip(f"this processor cannot run the {build} library")
    if folder := os.environ.get(SANITIZED):
        sanitized = KernelLibrary(build, Path(folder, f"{build}.so"))
        assert sanitized.is_usable()
        return sanitized
    library = raylens.cpu_kernels.library._load(build)
    assert library is not None, "the kernels are not built: `make compiler` installs one, then `make` builds them"
    return library
