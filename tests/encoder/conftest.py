"""What tests of the encoder share."""

import pytest

from raylens.modeling.families import known_to
from tests.encoder.small_vision import Small, make_small


@pytest.fixture(scope="session", params=known_to("encoder"))
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A small checkpoint of every family in turn."""
    return make_small(request.param, tmp_path_factory.mktemp("model"))
