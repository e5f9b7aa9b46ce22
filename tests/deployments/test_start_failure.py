"""A stage that cannot start says why, and in one line. A start without progress ends."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from raylens.deployments.config import AppConfig
from raylens.deployments.launch import app_lifetime
from raylens.deployments.launch.app_lifetime import end_app, start_app
from raylens.deployments.launch.local_cluster import deployed_app
from tests.checkpoint_copies import copy_checkpoint


@pytest.mark.slow
def test_a_stage_that_does_not_start_says_why(shapes: str, tmp_path: Path, ray_port: int) -> None:
    model = copy_checkpoint(shapes, tmp_path, lambda name: None if "projector.linear_1.bias" in name else name)
    reason = r"^Encode did not start: ValueError: .* lacks weights of the vision half: .*linear_1.bias'\]$"
    app = deployed_app(AppConfig(model=model), host="127.0.0.1", port=ray_port)
    with pytest.raises(RuntimeError, match=reason), app:
        pass


def test_a_resource_that_this_machine_never_has_ends_the_start_at_once(shapes: str, ray_port: int) -> None:
    config = AppConfig.model_validate({"model": shapes, "encode": {"num_gpus": 1}})
    app = deployed_app(config, host="127.0.0.1", port=ray_port)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^Encode waits for 1 GPU, and this machine has none$"), app:
        pass
    assert time.monotonic() - started < 10


@serve.deployment(graceful_shutdown_timeout_s=0.1)
class Slow:
    """Takes some seconds to start, at work or not."""

    def __init__(self, mark: Path, seconds: float, works: bool) -> None:
        mark.touch()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not works:
                time.sleep(0.1)


def start_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, *, works: bool) -> None:
    """Starts an application whose time is over as soon as its replica loads."""
    app: Any = Slow
    mark = tmp_path / "loads"
    monkeypatch.setattr(app_lifetime, "_QUIET_SECONDS", 2.0)

    def end_time() -> None:
        while not mark.exists():
            time.sleep(0.05)
        monkeypatch.setattr(app_lifetime, "_START_SECONDS", 0.0)

    watching = threading.Thread(target=end_time)
    watching.start()
    try:
        start_app(app.bind(mark, seconds, works), "slow", {}, lambda line: None)
    finally:
        watching.join()
        end_app("slow")


@pytest.mark.usefixtures("ray_port")
def test_a_start_without_progress_ends_and_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"^no stage has worked for 2 s, \d+ s after the start: slow loading$"):
        start_slow(tmp_path, monkeypatch, 60, works=False)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_port")
def test_a_stage_that_works_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_slow(tmp_path, monkeypatch, 6, works=True)


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
