"""Decode steps of several ranks run as graphs, with their collectives; without a GPU by a stand-in for recording."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from raylens.llm.config import EngineConfig
from raylens.llm.cuda.first_steps import run_first_steps
from raylens.llm.model_runner import ModelRunner
from raylens.llm.ranks.parallel import ProcessGroup
from raylens.llm.step_input import StepInput, StepOutput
from raylens.modeling.cuda_graphs import NotRecordableError
from tests.llm.attention_reference import BLOCK_SIZE
from tests.llm.ranks import on_both, pool_for_rank_one
from tests.small_models import make_checkpoint

pytest.importorskip("triton")

from tests.llm.graph_recorder import Recorder, with_graphs


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with pool_for_rank_one() as pool:
        yield pool


def make_runner(group: ProcessGroup, checkpoint: str) -> ModelRunner:
    config = EngineConfig(checkpoint, kv_cache_bytes=2**22, block_size=BLOCK_SIZE, max_num_seqs=6)
    return ModelRunner(config, group)


@torch.inference_mode()
def logits_of_steps(runner: ModelRunner) -> list[torch.Tensor]:
    kept = []

    def run(step: StepInput) -> StepOutput:
        output = runner.run_step(step)
        kept.append(output.logits.clone())
        return output

    run_first_steps(run, block=3, block_size=BLOCK_SIZE, num_rope_axes=1, max_length=40)
    return kept


def by_graphs_and_without(group: ProcessGroup, checkpoint: str) -> tuple[list[int], float]:
    """The sizes of the graphs that ran, and how far logits are at most from those without graphs."""
    runner, recorder = make_runner(group, checkpoint), Recorder()
    with torch.inference_mode():
        with_graphs(runner, recorder)
    own = logits_of_steps(runner)
    runner._graphs = None
    plain = logits_of_steps(runner)
    return recorder.replayed, max(float((a - b).abs().max()) for a, b in zip(own, plain, strict=True))


def test_ranks_replay_the_same_graphs(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    for replayed, difference in on_both(pool, by_graphs_and_without, make_checkpoint("llava", tmp_path)):
        assert replayed == [1]
        assert difference < 1e-5


class CannotRecord(Recorder):
    def capture(self, function: Any) -> Any:
        raise NotRecordableError("it waits for the GPU")


def has_graphs(group: ProcessGroup, checkpoint: str, failing_rank: int) -> bool:
    runner = make_runner(group, checkpoint)
    with torch.inference_mode():
        with_graphs(runner, Recorder())  # an attention as on a GPU
    recorder = CannotRecord() if group.rank == failing_rank else Recorder()
    with (
        patch("raylens.llm.model_runner.CudaCapture", lambda device: recorder.capture),
        patch.object(runner, "forward", lambda *_: (torch.zeros(1, 1), torch.zeros(1, 1))),
    ):
        return runner._capture_graphs() is not None


@pytest.mark.parametrize(("failing_rank", "expected"), [(0, False), (1, False), (2, True)])
def test_all_ranks_have_graphs_or_none_does(
    pool: ProcessPoolExecutor, tmp_path: Path, failing_rank: int, expected: bool
) -> None:
    found = on_both(pool, has_graphs, make_checkpoint("llava", tmp_path), failing_rank)
    assert found == (expected, expected)
