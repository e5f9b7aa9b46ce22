"""The KV cache gets what is left of a GPU, and never more than was allowed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raylens.cpu_kernels.library import VARIABLE
from raylens.llm.cache_size import bytes_left_for_cache, shortage_explained, worst_step
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.model_runner import ModelRunner
from tests.small_models import make_checkpoint

DEVICE = torch.device("cuda", 0)


def pretend(monkeypatch: pytest.MonkeyPatch, *, total: int, free: int, reserved: int, peak: int) -> list[str]:
    """A GPU of whose memory so much is taken; returns what happens in which order."""
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    return events


def left(run: Callable[[], None] = lambda: None, *, bytes_of_block: int = 1, **settings: Any) -> int:
    config = EngineConfig("model", device="cuda", **settings)
    return bytes_left_for_cache(run, DEVICE, config, num_tokens=8192, bytes_of_block=bytes_of_block)


def test_what_is_left_is_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    events = pretend(monkeypatch, total=1000, free=650, reserved=200, peak=300)
    # Others hold 1000 - 650 - 200 = 150.
    assert left(lambda: events.append("run")) == 900 - 150 - 300
    assert events == ["empty", "reset", "run", "wait", "empty"]


def test_what_is_reserved_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, total=1000, free=650, reserved=200, peak=300)
    assert left(reserved_bytes=100) == 900 - 150 - 300 - 100


def test_two_engines_on_one_gpu_have_equal_caches_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, total=1000, free=800, reserved=200, peak=200)
    first = left(gpu_share=0.5)
    # The first one holds its weights, 150, and its cache.
    pretend(monkeypatch, total=1000, free=1000 - 150 - first - 200, reserved=200, peak=200)
    assert left(gpu_share=0.5) == first == 450 - 200


def test_an_engine_never_plans_with_what_others_hold_of_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, total=1000, free=200, reserved=200, peak=200)
    assert left(gpu_share=0.7) == 900 - 600 - 200


def test_a_gpu_that_is_too_small_is_refused_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, total=1000, free=650, reserved=200, peak=300)
    with pytest.raises(
        ValueError,
        match=r"memory_fraction \(0.45\) of 1000 bytes has no room .* a block takes 1 bytes, and 0 are left.*8192"
        r" tokens \(max_num_batched_tokens is 8192, max_num_seqs 256\), take 300, other processes 150, reserved are 0;"
        r" lower max_num_batched_tokens or max_num_seqs, or raise memory_fraction",
    ):
        left(memory_fraction=0.45)


def test_the_largest_step_needs_a_block_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, total=1000, free=650, reserved=200, peak=300)
    assert left(bytes_of_block=450) == 450
    with pytest.raises(ValueError, match="a block takes 451 bytes, and 450 are left"):
        left(bytes_of_block=451)


def test_a_step_that_a_gpu_does_not_hold_is_refused_with_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, total=1000, free=50, reserved=800, peak=0)
    config = EngineConfig("model", device="cuda")
    with (
        pytest.raises(
            ValueError,
            match=r"the GPU's memory \(1000 bytes\) .* 8447 tokens \(max_num_batched_tokens is 8192, max_num_seqs 256\)"
            r".* more than the 850 bytes that others leave; lower max_num_batched_tokens",
        ),
        shortage_explained(DEVICE, config, 8447),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_an_engine_whose_largest_step_does_not_fit_does_not_start(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pretend(monkeypatch, total=1000, free=50, reserved=800, peak=0)
    monkeypatch.setattr(ModelRunner, "_count_blocks", out_of_memory)
    with pytest.raises(ValueError, match="lower max_num_batched_tokens"):
        ModelRunner(EngineConfig(shapes))


@pytest.mark.parametrize(
    ("settings", "num_seqs", "num_tokens"),
    [
        ({}, 64, 384),
        ({"device": "cuda"}, 256, 8192),
        ({"device": "cuda:1", "max_num_seqs": None, "max_num_batched_tokens": None}, 256, 8192),
        ({"device": "cuda", "max_num_seqs": 16}, 16, 8192),
        ({"device": "cuda", "max_num_seqs": 9000}, 9000, 9000),
        ({"max_num_batched_tokens": 32}, 32, 32),
    ],
)
def test_steps_are_as_large_as_the_device_wants(settings: dict[str, Any], num_seqs: int, num_tokens: int) -> None:
    config = EngineConfig("model", **settings)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (num_seqs, num_tokens)


@pytest.mark.parametrize("has_items", [False, True])
@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl", "gemma3", "blip-2", "wemm"])
def test_the_worst_step_can_be_run_with_a_cache_of_one_block(tmp_path: Path, model_type: str, has_items: bool) -> None:
    runner = ModelRunner(EngineConfig(make_checkpoint(model_type, tmp_path), block_size=4, kv_cache_bytes=2**16))
    step = worst_step(
        num_tokens=24,
        num_positions=50,
        num_logits=9,
        num_rope_axes=runner._family.num_rope_axes,
        block_size=4,
        is_span=runner._family.has_spans,
        embedding_size=runner.embedding_size if has_items else None,
    )
    assert len(step.embed_rows) == (24 if has_items else 0)
    assert (step.query_lengths, step.context_lengths) == ([24], [50])
    assert set(step.block_tables[0]) == {0}
    assert len(runner.run_step(step).logits) == 9


def test_a_short_context_bounds_the_worst_step() -> None:
    step = worst_step(num_tokens=512, num_positions=50, num_logits=2, num_rope_axes=3, block_size=16, is_span=True)
    assert step.positions.shape == (3, 50)
    assert len(step.spans_of(0)[0].members) == 50
    assert len(step.block_tables[0]) == 4


@pytest.mark.parametrize("kernels", ["", "off"])
def test_the_cache_is_never_larger_than_configured(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    # Heads of 12 numbers: the kernels' rows are longer.
    checkpoint = make_checkpoint("llava", tmp_path, {"head_dim": 12})
    for kv_cache_bytes in (2**16, 10**5):
        attention: Any = ModelRunner(EngineConfig(checkpoint, kv_cache_bytes=kv_cache_bytes))._attention
        if kernels == "off":
            held = sum(cache.nbytes for cache in (*attention._keys, *attention._values))
        else:
            tensors = (tensor for cache in attention.caches for tensor in (cache.keys, cache.values))
            held = sum(len(tensor) * tensor.stride(0) * tensor.itemsize for tensor in tensors)
        assert 0.8 * kv_cache_bytes < held <= kv_cache_bytes


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="memory_fraction"):
        EngineConfig("model", memory_fraction=fraction)


@pytest.mark.gpu
def test_an_engine_stays_within_its_share_of_the_gpu(tmp_path: Path) -> None:
    total = torch.cuda.mem_get_info()[1]
    engine = LLMEngine(EngineConfig(make_checkpoint("llava", tmp_path), device="cuda", memory_fraction=0.3))
    free = torch.cuda.mem_get_info()[0]
    assert engine._runner.num_blocks > 1000
    assert 0.2 * total < total - free < 0.33 * total
