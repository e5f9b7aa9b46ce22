"""A recorded tower computes what it computes otherwise. Without a GPU a record is a function that runs once more over
the same memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from raylens.encoder.config import EncoderConfig, PartConfig
from raylens.encoder.engine import EncoderEngine
from raylens.encoder.loader import load_vision_half
from raylens.encoder.tower_graphs import SIZES, TowerGraphs
from raylens.modeling.cuda_graphs import CudaCapture, NotRecordableError
from raylens.modeling.families import known_to, load_family
from tests.encoder.small_vision import Small, make_small

Replay = Callable[[], Any]


@dataclass
class Recorder(CudaCapture):
    """Stands in for CUDA: runs what was recorded again, notes how large it was and reuses its outputs' memory."""

    recorded: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    num_bytes: int = 0

    def __call__(self, function: Replay) -> Replay:
        outputs = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, function())
        tensors = [value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor)]
        size = len(tensors[0])
        self.recorded.append(size)
        self.num_bytes += size

        def replay() -> Any:
            self.replayed.append(size)
            new = [value for value in tree_leaves(function()) if isinstance(value, torch.Tensor)]
            for kept, value in zip(tensors, new, strict=True):
                kept.copy_(value)
            return outputs

        return replay


@pytest.fixture(scope="module", params=[name for name in known_to("encoder") if load_family("encoder", name).has_tiles])
def tiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small(request.param, tmp_path_factory.mktemp("model"))


def load(small: Small, part: PartConfig | None = None) -> tuple[PreTrainedModel, nn.Module]:
    part = part or PartConfig()
    half, family = load_vision_half(EncoderConfig(small.checkpoint, tower=part, projector=part))
    return half, half.get_submodule(family.tower)


@torch.inference_mode()
def test_recorded_embeddings_equal_the_whole_models(tiled: Small) -> None:
    half, tower = load(tiled)
    recorder = Recorder()
    TowerGraphs(tower, recorder, max_bytes=10**9)
    for _ in range(2):
        for prompt in tiled.prompts:
            found = tiled.modality(prompt).encode(half, prompt.tensors)
            assert all(torch.equal(own, other) for own, other in zip(found, prompt.expected, strict=True))
    assert set(recorder.replayed) <= set(recorder.recorded) <= set(SIZES)
    assert len(recorder.replayed) >= 2 * 5, "pictures have few tiles"


def test_activations_are_measured_without_graphs_and_bound_their_memory(shapes: str) -> None:
    engine, recorder = EncoderEngine(EncoderConfig(shapes)), Recorder()
    engine._graphs = TowerGraphs(engine._model.get_submodule(engine._family.tower), recorder, max_bytes=10**12)
    engine.bound_activations("image", {"pixel_values": torch.randn(3, 96, 96)}, 10**8)
    assert recorder.recorded == []
    assert engine._graphs.max_bytes == 10**8


class Tower(nn.Module):
    """Squares, and the tiles themselves."""

    def forward(self, pixels: torch.Tensor, *, mask: torch.Tensor | None = None, power: int = 2) -> dict[str, Any]:
        return {"powers": pixels**power, "layers": (pixels,), "name": "tower"}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def tower(recorder: Recorder) -> Tower:
    tower = Tower()
    tower.graphs = TowerGraphs(tower, recorder, max_bytes=10**9)  # type: ignore[assignment]
    return tower


def test_a_batch_takes_the_smallest_graph_that_holds_it(tower: Tower, recorder: Recorder) -> None:
    for num_tiles in (1, 5, 6, 16, 17, 5):
        tiles = torch.randn(num_tiles, 3)
        outputs = tower(tiles)
        assert torch.equal(outputs["powers"], tiles**2)
        assert torch.equal(outputs["layers"][0], tiles)
        assert outputs["name"] == "tower"
    assert recorder.recorded == [1, 6, 16]
    assert recorder.replayed == [1, 6, 6, 16, 6]


def test_what_an_earlier_batch_left_changes_nothing(tower: Tower) -> None:
    tower(torch.full((4, 3), torch.nan))
    assert torch.equal(tower(torch.ones(3, 3))["powers"], torch.ones(3, 3))
    tower(torch.full((6, 3), torch.nan))
    assert torch.equal(tower(torch.ones(5, 3))["powers"], torch.ones(5, 3))


def test_other_arguments_and_shapes_have_graphs_of_their_own(tower: Tower, recorder: Recorder) -> None:
    tiles = torch.randn(2, 3)
    for _ in range(2):
        assert torch.equal(tower(tiles)["powers"], tiles**2)
        assert torch.equal(tower(tiles, power=3)["powers"], tiles**3)
        assert torch.equal(tower(pixels=tiles)["powers"], tiles**2)
        assert tower(tiles[:, :2])["powers"].shape == (2, 2)
        assert tower(tiles.double())["powers"].dtype == torch.float64
    assert recorder.recorded == [2] * 5
    tower(tiles, mask=tiles)  # of two tensors there is no telling which is the tiles
    assert len(recorder.replayed) == 10


def test_nothing_is_recorded_beyond_the_memory_for_it(recorder: Recorder) -> None:
    tower = Tower()
    TowerGraphs(tower, recorder, max_bytes=5)
    for num_tiles in (4, 2, 1, 4, 2):
        assert len(tower(torch.ones(num_tiles, 3))["powers"]) == num_tiles
    assert recorder.recorded == [4, 2]
    assert recorder.replayed == [4, 2, 4, 2]


def test_a_pause_records_and_replays_nothing(tower: Tower, recorder: Recorder) -> None:
    graphs: Any = tower.graphs
    graphs.is_measured = True
    tower(torch.ones(1, 3))
    graphs.is_measured = False
    assert recorder.recorded == recorder.replayed == []
    tower(torch.ones(1, 3))
    assert recorder.replayed == [1]


@dataclass
class Failing(Recorder):
    error: RuntimeError = field(default_factory=RuntimeError)

    def __call__(self, function: Replay) -> Replay:
        self.recorded.append(0)
        raise self.error


@pytest.mark.parametrize("error", [NotRecordableError("it waits"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_tower_that_cannot_be_recorded_runs_as_it_is(error: RuntimeError, caplog: pytest.LogCaptureFixture) -> None:
    tower, recorder = Tower(), Failing(error=error)
    TowerGraphs(tower, recorder, max_bytes=10**9)
    for num_tiles in (1, 2, 1):
        assert len(tower(torch.ones(num_tiles, 3))["powers"]) == num_tiles
    assert recorder.recorded == [0]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [torch.AcceleratorError("illegal memory access"), RuntimeError("no compiler")])
def test_a_tower_that_fails_by_itself_is_not_taken_for_one_that_cannot_be_recorded(error: RuntimeError) -> None:
    tower, recorder = Tower(), Failing(error=error)
    TowerGraphs(tower, recorder, max_bytes=10**9)
    with pytest.raises(type(error), match=str(error)):
        tower(torch.ones(1, 3))


def test_outputs_that_are_not_by_tile_are_not_cut(recorder: Recorder) -> None:
    class Joined(nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return pixels.flatten(0, 1)

    tower = Joined()
    TowerGraphs(tower, recorder, max_bytes=10**9)
    assert tower(torch.ones(3, 4)).shape == (12,)
    assert recorder.replayed == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_graphs_on_the_gpu_compute_what_the_tower_does(tiled: Small, dtype: torch.dtype) -> None:
    part, device = PartConfig(dtype, "cuda"), torch.device("cuda")
    half, tower = load(tiled, part)
    capture = CudaCapture(device)
    graphs = TowerGraphs(tower, capture, max_bytes=2**32)
    for prompt in tiled.prompts:
        items = [{name: value.to(device) for name, value in item.items()} for item in prompt.tensors]
        for _ in range(2):
            found = tiled.modality(prompt).encode(half, items)
        graphs.is_measured = True
        expected = tiled.modality(prompt).encode(half, items)
        graphs.is_measured = False
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=5e-2, atol=5e-2)
    assert any(graph.replays for graph in graphs._graphs.values()), "nothing was recorded"
