"""What tests of the pipeline share."""

import pytest

from raylens.deployments.ray_internals.references import PackedReference
from tests.deployments.pipeline.stand_in_stages import packed


@pytest.fixture(autouse=True)
def stand_in_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests have no Ray, so references are stand-ins."""
    monkeypatch.setattr(PackedReference, "of", packed)
