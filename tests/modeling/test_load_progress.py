"""A long download and a long load tell the log how far they are, a short one nothing."""

import logging
import re
import time
from typing import Any

import pytest
from huggingface_hub.utils.tqdm import is_tqdm_disabled
from huggingface_hub.utils.tqdm import tqdm as HubBar

from raylens.encoder.config import EncoderConfig
from raylens.encoder.loader import load_vision_half
from raylens.modeling import load_progress
from raylens.modeling.load_progress import told_progress


def download() -> None:
    bar: Any = HubBar(  # type: ignore[no-untyped-call]
        total=10_000_000, desc="model.safetensors", unit="B", unit_scale=True, disable=is_tqdm_disabled(logging.INFO)
    )
    with bar:
        for _ in range(10):
            time.sleep(0.15)
            bar.update(1_000_000)


def test_a_long_download_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_progress, "_FIRST_SECONDS", 0.5)
    monkeypatch.setattr(load_progress, "_SECONDS", 0.5)
    with caplog.at_level(logging.INFO, load_progress.logger.name), told_progress():
        download()
    assert 1 <= len(caplog.messages) <= 3
    assert re.fullmatch(r"model\.safetensors: 4\.00M of 10\.0MB, 1 s, 00:0\d left", caplog.messages[0])
    assert capfd.readouterr().err.count("\r") == 0


def test_a_short_one_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, load_progress.logger.name), told_progress():
        download()
    assert caplog.messages == []


def test_loading_weights_is_told(
    shapes: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_progress, "_FIRST_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, load_progress.logger.name):
        load_vision_half(EncoderConfig(shapes))
    assert any(message.startswith("Loading weights: ") for message in caplog.messages)
