"""What tests of several packages share."""

import os
from pathlib import Path

import pytest
import torch

from raylens.checkpoints import BUNDLED_MODEL
from raylens.modeling.torchvision_build import make_importable

# One thread each: the tests' engines and the application's replicas share two cores. (And where several threads divide
# a product's rows among them, the last bits of a row depend on how many others there are.)
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Handles of a session that has ended push metrics once more, for which Ray would start a new one behind our backs.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

# Ray's workers import stand-ins of tests. Nothing of the checkout is on their path.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])

# Ray reads this when it is imported, which modules of tests do before a server is started: it stays on loopback.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

# Replicas send spans soon, because tests wait for them.
os.environ.setdefault("OTEL_BSP_SCHEDULE_DELAY", "500")

# Triton's kernels run in its interpreter where there is no GPU; it asks for this when they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Before any test imports transformers' own processors, which it compares ours with.
make_importable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules beside this file start first. Two of them take half a minute each, for which a process would be left
    alone with them at the end of a run."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def shapes() -> str:
    """The folder of the bundled checkpoint."""
    return str(BUNDLED_MODEL)
