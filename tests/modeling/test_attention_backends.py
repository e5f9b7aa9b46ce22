"""Whoever computes on a GPU never waits for cuDNN to plan a shape. Engines say so themselves, also used alone."""

from collections.abc import Iterator

import pytest
import torch

from raylens.encoder.config import EncoderConfig
from raylens.encoder.engine import EncoderEngine
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from tests.small_models import make_checkpoint


def kernels_in_use() -> set[str]:
    names = ("cudnn", "flash", "mem_efficient", "math")
    return {name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()}


@pytest.fixture(autouse=True)
def cudnn_as_pytorch_starts() -> Iterator[None]:
    before = "cudnn" in kernels_in_use()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llava", tmp_path_factory.mktemp("model"))


def test_a_language_engine_turns_cudnn_attention_off_alone(checkpoint: str) -> None:
    LLMEngine(EngineConfig(checkpoint, kv_cache_bytes=2**20))
    assert kernels_in_use() == {"flash", "mem_efficient", "math"}


def test_an_encoder_engine_turns_cudnn_attention_off_alone(checkpoint: str) -> None:
    EncoderEngine(EncoderConfig(checkpoint))
    assert kernels_in_use() == {"flash", "mem_efficient", "math"}
