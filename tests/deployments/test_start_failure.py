"""A stage that cannot start says why, and in one line."""

from pathlib import Path

import pytest

from deployments.config import AppConfig
from deployments.local_cluster import free_port, running_app
from tests.checkpoint_copies import copy_checkpoint


def test_a_stage_that_does_not_start_says_why(shapes: str, tmp_path: Path) -> None:
    model = copy_checkpoint(shapes, tmp_path, lambda name: None if "projector.linear_1.bias" in name else name)
    reason = r"^Encode did not start: ValueError: .* lacks weights of the vision half: .*linear_1.bias'\]$"
    app = running_app(AppConfig(model=model), host="127.0.0.1", port=free_port())
    with pytest.raises(RuntimeError, match=reason), app:
        pass
