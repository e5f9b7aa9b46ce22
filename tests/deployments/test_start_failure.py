"""A stage that cannot start says why, and in one line."""

from pathlib import Path

import pytest

from deployments.config import AppConfig
from deployments.local_cluster import deployed_app
from tests.checkpoint_copies import copy_checkpoint


def test_a_stage_that_does_not_start_says_why(shapes: str, tmp_path: Path, ray_port: int) -> None:
    model = copy_checkpoint(shapes, tmp_path, lambda name: None if "projector.linear_1.bias" in name else name)
    reason = r"^Encode did not start: ValueError: .* lacks weights of the vision half: .*linear_1.bias'\]$"
    app = deployed_app(AppConfig(model=model), host="127.0.0.1", port=ray_port)
    with pytest.raises(RuntimeError, match=reason), app:
        pass


@pytest.mark.slow
def test_settings_that_cannot_serve_the_models_own_pictures_are_refused_with_the_numbers(
    shapes: str, ray_port: int
) -> None:
    config = AppConfig(model=shapes, max_model_len=36)
    reason = r"^Generate did not start: ValueError: the model's largest picture takes 36 tokens, .* max_model_len is 36"
    app = deployed_app(config, host="127.0.0.1", port=ray_port)
    with pytest.raises(RuntimeError, match=reason), app:
        pass


@pytest.mark.slow
def test_a_model_that_cannot_be_divided_is_refused_with_its_sizes(shapes: str, ray_port: int) -> None:
    config = AppConfig.model_validate({"model": shapes, "generate": {"tensor_parallel_size": 3, "num_cpus": 0.5}})
    reason = (
        r"^Generate did not start: RuntimeError: rank [012] could not load: ValueError: "
        r".*: 2 key/value heads cannot be divided by 3 ranks$"
    )
    app = deployed_app(config, host="127.0.0.1", port=ray_port)
    with pytest.raises(RuntimeError, match=reason), app:
        pass
