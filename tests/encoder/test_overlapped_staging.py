"""Copies beside the computation lose and mix up nothing. Without a GPU they are made as late as one may make them."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlavaForConditionalGeneration

from raylens.encoder.config import EncoderConfig, PartConfig
from raylens.encoder.engine import EncoderEngine
from raylens.encoder.schema import EncodeOutput
from raylens.encoder.staging import (
    CudaTransfers,
    DirectStaging,
    Encode,
    OverlappedStaging,
    PendingEmbeddings,
    make_staging,
)
from raylens.encoder.tower_graphs import TowerGraphs, make_graphs
from raylens.preprocess.schema import ItemTensors
from tests.encoder.small_vision import Small
from tests.encoder.test_tower_graphs import Recorder

NUM_PATCHES = 36  # 96 pixels a side, in squares of 16

Copies = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class LateTransfers(CudaTransfers):
    """Stands in for CUDA: uploads when the computation needs them, downloads when somebody waits for them, and fresh
    memory is full of what does not belong there."""

    uploads: Copies = field(default_factory=list)
    num_uploads: int = 0

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.full((size,), 0xFF, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        device = torch.full_like(host, 0xFF)
        self.uploads.append((host, device))
        self.num_uploads += 1
        return device

    def compute(self) -> AbstractContextManager[object]:
        _copy(self.uploads)
        return nullcontext()

    def download(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], object]:
        waiting = list(copies)
        return lambda: _copy(waiting)


@torch.inference_mode()
def _copy(copies: Copies) -> None:
    while copies:
        source, target = copies.pop()
        target.copy_(source)


def test_tensors_of_all_kinds_arrive_in_one_upload(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "pixels", dtype=np.float32, mode="w+", shape=(3, 5))
    mapped[:] = np.arange(15).reshape(3, 5)
    items: list[ItemTensors] = [
        {"pixels": torch.from_numpy(mapped), "mask": torch.tensor([[True, False, True]])},
        {"pixels": torch.randn(7, 4).T, "count": torch.tensor(3), "grid": torch.tensor([1, 2, 3])},
        {"pixels": torch.randn(2, 3).bfloat16(), "nothing": torch.empty(0, 4), "grid": torch.tensor([4, 5, 6])},
    ]
    seen: list[ItemTensors] = []

    def encode(moved: list[ItemTensors]) -> list[torch.Tensor]:
        seen.extend({name: tensor.clone() for name, tensor in item.items()} for item in moved)
        assert [item.get("grid") is own.get("grid") for item, own in zip(moved, items, strict=True)] == [True] * 3
        return [item["pixels"] * 2 for item in moved]

    transfers = LateTransfers()
    pending = OverlappedStaging(transfers).run(encode, items, frozenset({"grid"}))
    assert transfers.num_uploads == 1
    for own, item, get in zip(seen, items, pending, strict=True):
        assert own.keys() == item.keys()
        assert all(torch.equal(own[name], tensor) and own[name].dtype == tensor.dtype for name, tensor in item.items())
        assert torch.equal(get(), item["pixels"] * 2)


@pytest.fixture(scope="module")
def whole_model(shapes: str) -> Any:
    return LlavaForConditionalGeneration.from_pretrained(shapes, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def loaded(shapes: str) -> EncoderEngine:
    return EncoderEngine(EncoderConfig(shapes, max_batch_patches=2 * NUM_PATCHES))


@pytest.fixture
def engine(loaded: EncoderEngine, monkeypatch: pytest.MonkeyPatch) -> EncoderEngine:
    """With what one on a GPU has."""
    monkeypatch.setattr(loaded, "_staging", OverlappedStaging(LateTransfers()))
    return loaded


def pixels(seed: int) -> torch.Tensor:
    return torch.randn(3, 96, 96, generator=torch.Generator().manual_seed(seed))


def add(engine: EncoderEngine, *names: str) -> None:
    for name in names:
        engine.add_request(name, "image", {"pixel_values": pixels(int(name))})


def names(outputs: list[EncodeOutput]) -> list[str]:
    return [output.request_id for output in outputs]


def test_a_batch_is_launched_before_the_one_before_it_is_waited_for(engine: EncoderEngine, whole_model: Any) -> None:
    add(engine, "0", "1", "2", "3", "4")
    assert engine.step() == []
    outputs = engine.step()
    assert names(outputs) == ["0", "1"]
    outputs += engine.step()
    assert not engine.is_idle
    outputs += engine.step()
    assert names(outputs) == ["0", "1", "2", "3", "4"]
    assert engine.is_idle
    assert engine.step() == []
    for output in outputs:
        with torch.inference_mode():
            (expected,) = whole_model.get_image_features(
                pixel_values=pixels(int(output.request_id))[None]
            ).pooler_output
        assert output.embeddings is not None
        assert torch.equal(output.embeddings, expected)
        assert output.embeddings.untyped_storage().nbytes() == output.embeddings.nbytes


def test_graphs_whose_outputs_the_next_batch_overwrites_change_nothing(shapes: str, whole_model: Any) -> None:
    engine, recorder = EncoderEngine(EncoderConfig(shapes, max_batch_patches=2 * NUM_PATCHES)), Recorder()
    TowerGraphs(engine._model.get_submodule(engine._family.tower), recorder, max_bytes=10**9)
    engine._staging = OverlappedStaging(LateTransfers())
    test_a_batch_is_launched_before_the_one_before_it_is_waited_for(engine, whole_model)
    assert recorder.replayed == [2, 2, 1]


def test_segments_of_an_item_in_two_batches_at_a_time_are_put_together(engine: EncoderEngine, whole_model: Any) -> None:
    tiles = torch.stack([pixels(seed) for seed in range(5)])
    started = time.perf_counter()
    engine.add_request("large", "image", {"pixel_values": tiles})
    assert [engine.step() for _ in range(3)] == [[], [], []]
    (output,) = engine.step()
    assert engine.is_idle
    with torch.inference_mode():
        expected = whole_model.get_image_features(pixel_values=tiles).pooler_output
    assert output.embeddings is not None
    assert torch.equal(output.embeddings, torch.cat(tuple(expected)))
    assert output.queue_seconds >= 0
    assert output.queue_seconds + output.encode_seconds <= time.perf_counter() - started


def test_nothing_comes_of_an_item_that_is_aborted_while_a_segment_is_encoded(engine: EncoderEngine) -> None:
    engine.add_request("large", "image", {"pixel_values": torch.stack([pixels(seed) for seed in range(5)])})
    assert engine.step() == []
    engine.abort("large")
    add(engine, "0")
    outputs: list[EncodeOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert names(outputs) == ["0"]


@pytest.fixture
def choking(engine: EncoderEngine, monkeypatch: pytest.MonkeyPatch) -> EncoderEngine:
    """An engine whose model fails on pixels that are no numbers."""
    encode = engine._encode

    def choke(modality: str, items: list[ItemTensors]) -> list[PendingEmbeddings]:
        if any(item["pixel_values"].isnan().any() for item in items):
            raise RuntimeError("the model chokes on this segment")
        return encode(modality, items)

    monkeypatch.setattr(engine, "_encode", choke)
    return engine


@pytest.mark.parametrize("num_tiles", [4, 9])
def test_an_item_that_fails_while_its_next_segment_is_encoded_has_one_output(
    choking: EncoderEngine, num_tiles: int
) -> None:
    tiles = torch.stack([pixels(seed) for seed in range(num_tiles)])
    tiles[0] = torch.nan
    choking.add_request("bad", "image", {"pixel_values": tiles})
    outputs = [choking.step() for _ in range(3)]
    assert [names(one) for one in outputs] == [[], ["bad"], []]
    assert "chokes" in str(outputs[1][0].error)
    assert choking.is_idle, "no segment is left"


def test_an_item_that_is_aborted_before_a_segment_fails_has_no_output(choking: EncoderEngine) -> None:
    choking.add_request("bad", "image", {"pixel_values": torch.full((5, 3, 96, 96), torch.nan)})
    assert choking.step() == []
    choking.abort("bad")
    assert choking.step() == []
    assert choking.is_idle


def test_an_item_is_in_work_until_its_embeddings_are_out(engine: EncoderEngine) -> None:
    add(engine, "0")
    assert engine.has_unfinished()
    assert engine.step() == []
    assert engine.has_unfinished()
    engine.abort("0")  # too late, and harmless
    assert engine.has_unfinished()
    assert names(engine.step()) == ["0"]
    assert not engine.has_unfinished()


def test_a_bad_item_fails_alone_between_others(engine: EncoderEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(model: Any, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
        if any(item["pixel_values"].isnan().any() for item in items):
            raise RuntimeError("the model chokes on this item")
        return modality.encode(model, items)

    modality = engine._family.modalities["image"]
    monkeypatch.setattr(
        engine, "_family", replace(engine._family, modalities={"image": replace(modality, encode=encode)})
    )
    add(engine, "0", "1", "2")
    engine.add_request("bad", "image", {"pixel_values": pixels(0) * torch.nan})
    add(engine, "4", "5")
    outputs: list[EncodeOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert names(outputs) == ["0", "1", "2", "bad", "4", "5"]
    for output in outputs:
        assert (output.embeddings is None) == (output.error is not None) == (output.request_id == "bad")


class Sums:
    """In place of embeddings."""

    look_ahead = 1

    def run(self, encode: Encode, items: Sequence[ItemTensors], on_host: frozenset[str]) -> list[PendingEmbeddings]:
        return [item["pixel_values"].sum(dim=(-1, -2, -3)).reshape(-1, 1).clone for item in items]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["add", "add many tiles", "step", "abort"]), max_size=25))
def test_every_item_taken_gets_one_output_in_any_traffic(loaded: EncoderEngine, actions: list[str]) -> None:
    direct, loaded._staging = loaded._staging, Sums()
    sums: dict[str, list[float]] = {}
    gone: set[str] = set()
    outputs: list[EncodeOutput] = []
    engine = loaded
    for number, action in enumerate(actions):
        if action.startswith("add"):
            # Of a picture of many tiles, which goes in three segments, each tile has a sum of its own.
            sums[str(number)] = [float(number)] if action == "add" else [number + tile / 10 for tile in range(5)]
            means = torch.tensor(sums[str(number)])[:, None, None, None] / (3 * 96 * 96)
            engine.add_request(str(number), "image", {"pixel_values": means.expand(-1, 3, 96, 96)})
        elif action == "step":
            outputs += engine.step()
        elif sums:
            name = list(sums)[number % len(sums)]
            was_waiting = name in engine._scheduler._waiting
            engine.abort(name)
            gone |= {name} if was_waiting else set()
    while engine.has_unfinished():
        outputs += engine.step()
    loaded._staging = direct
    assert sorted(names(outputs)) == sorted(sums.keys() - gone)
    for output in outputs:
        assert output.embeddings is not None
        expected = torch.tensor(sums[output.request_id])[:, None]
        torch.testing.assert_close(output.embeddings, expected, rtol=0, atol=1e-2)


def test_there_is_nothing_of_this_on_the_cpu(loaded: EncoderEngine, shapes: str) -> None:
    config = EncoderConfig(shapes)
    assert isinstance(make_staging(config), DirectStaging)
    assert make_graphs(loaded._model, loaded._family, config) is None
    # Between two devices the host has to wait anyway.
    assert isinstance(make_staging(replace(config, tower=PartConfig(device="cuda"))), DirectStaging)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_engine_on_the_gpu_is_near_float32_on_the_cpu(small: Small, dtype: torch.dtype) -> None:
    if small.model_type == "chameleon":
        pytest.skip("its embeddings are those of a few other tokens, then")
    part = PartConfig(dtype, "cuda")
    engine = EncoderEngine(EncoderConfig(small.checkpoint, tower=part, projector=part))
    expected: dict[str, torch.Tensor] = {}
    for round_ in range(3):  # recorded, replayed and, meanwhile, overwritten
        for number, prompt in enumerate(small.prompts):
            for place, (tensors, own) in enumerate(zip(prompt.tensors, prompt.expected, strict=True)):
                name = f"{round_} {number} {place}"
                engine.add_request(name, prompt.modality, tensors)
                expected[name] = own
    outputs: dict[str, EncodeOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs.keys() == expected.keys()
    for name, output in outputs.items():
        assert output.error is None
        assert output.embeddings is not None
        assert (output.embeddings.float() - expected[name]).norm() < 0.1 * expected[name].norm(), name


@pytest.mark.gpu
def test_a_batch_is_launched_without_waiting_for_the_gpu(shapes: str) -> None:
    part = PartConfig(torch.bfloat16, "cuda")
    engine = EncoderEngine(EncoderConfig(shapes, tower=part, projector=part, max_batch_patches=2 * NUM_PATCHES))
    for _ in range(2):  # the first time graphs are recorded, for which the GPU is waited for
        add(engine, "0", "1", "2", "3")
        torch.cuda.set_sync_debug_mode("default")
        while engine.has_unfinished():
            engine.step()
    add(engine, "0", "1")
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert engine.step() == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert names(engine.step()) == ["0", "1"]
