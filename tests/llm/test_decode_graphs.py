"""Recorded decode steps compute what the same steps compute otherwise. Without a GPU a record is a function that runs
once more over the same memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence
from raylens.llm.step_input import FedTokens, StepInput
from tests.llm.attention_reference import BLOCK_SIZE, make_builder
from tests.llm.greedy_answers import answers
from tests.small_models import make_checkpoint, small_requests, whole_class

pytest.importorskip("triton")

from raylens.llm.cuda.attention import CudaAttention
from raylens.llm.cuda.decode_graphs import DecodeGraphs, batch_sizes
from tests.llm.graph_recorder import DEVICE, MAX_LENGTH, MAX_NUM_SEQS, Recorder, with_graphs

NUM_TOKENS = 7
"""Of an answer. Triton's interpreter is slow."""


def make_engine(checkpoint: str, budget: int = 2048, *, is_ahead: bool = False) -> LLMEngine:
    return LLMEngine(
        EngineConfig(
            checkpoint,
            device=DEVICE.type,
            kv_cache_bytes=2**20,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=budget,
            block_size=BLOCK_SIZE,
            prompt_lookup=False,
            async_scheduling=is_ahead,
        )
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("model_type", "text_config"),
    [
        pytest.param("llava", {}, marks=pytest.mark.slow),
        ("qwen3_vl", {}),
        ("gemma3", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}),
    ],
)
@pytest.mark.parametrize("is_ahead", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "ahead"])
def test_recorded_answers_equal_generate(
    tmp_path: Path, model_type: str, text_config: dict[str, object], is_ahead: bool
) -> None:
    checkpoint = make_checkpoint(model_type, tmp_path, text_config)
    model = whole_class(model_type).from_pretrained(checkpoint, dtype=torch.float32).eval()
    requests = small_requests(model_type, model)
    engine, recorder = make_engine(checkpoint, is_ahead=is_ahead), Recorder()
    with_graphs(engine._runner, recorder)
    assert answers(engine, requests, NUM_TOKENS) == [one.expected[:NUM_TOKENS] for one in requests]
    # The first token of each answer is the prompt's.
    assert recorder.replayed == [min(size for size in recorder.sizes if size >= len(requests))] * (NUM_TOKENS - 1)


@pytest.mark.long
@pytest.mark.parametrize("is_ahead", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "ahead"])
def test_answers_between_chunks_of_prompts_equal_generate(checkpoint: str, is_ahead: bool) -> None:
    """Some steps decode only, some compute a chunk as well, behind what the cache has of its prompt."""
    model = whole_class("llava").from_pretrained(checkpoint, dtype=torch.float32).eval()
    requests = small_requests("llava", model)
    engine, recorder = make_engine(checkpoint, budget=11, is_ahead=is_ahead), Recorder()
    with_graphs(engine._runner, recorder)
    for _ in range(2):  # the second time their beginnings are cached
        recorder.replayed.clear()
        assert answers(engine, requests, NUM_TOKENS) == [one.expected[:NUM_TOKENS] for one in requests]
        assert recorder.replayed


@dataclass
class Decoding:
    """Sequences of `lengths` of which all but the last token are in the cache, whose numbers are random."""

    engine: LLMEngine
    recorder: Recorder
    attention: CudaAttention

    def step(self, lengths: list[int], first_block: int = 0) -> StepInput:
        chunks = []
        for index, length in enumerate(lengths):
            num_blocks = -(-length // BLOCK_SIZE)
            sequence = Sequence(str(index), list(range(5, 5 + length)), length - 1, [], MAX_LENGTH + 2)
            sequence.num_computed_tokens = length - 1
            sequence.block_table = list(range(first_block, first_block + num_blocks))
            first_block += num_blocks
            chunks.append(ScheduledChunk(sequence, 1))
        return make_builder().build(chunks)

    def cache(self) -> list[torch.Tensor]:
        return [*self.attention._keys, *self.attention._values]

    def fill(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for tensor in self.cache():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))

    @property
    def graphs(self) -> DecodeGraphs:
        assert self.engine._runner._graphs is not None
        return self.engine._runner._graphs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llava", tmp_path_factory.mktemp("model"))


@pytest.fixture
def decoding(checkpoint: str) -> Decoding:
    engine, recorder = make_engine(checkpoint), Recorder()
    return Decoding(engine, recorder, with_graphs(engine._runner, recorder))


@pytest.mark.long
def test_padding_changes_nothing(decoding: Decoding) -> None:
    """Logits and cache are those of the step itself, after a larger one has left its numbers in the inputs."""
    decoding.fill()
    decoding.engine._runner.run_step(decoding.step([9, 1, 30, 2, 7, 5], first_block=20))
    for lengths, size in (([7, 13, 20], 4), ([3], 1), ([60, 1], 2), ([5] * 5, 6)):
        results = []
        for has_graphs in (True, False):
            decoding.fill()
            runner = decoding.engine._runner
            graphs = decoding.graphs
            if not has_graphs:
                runner._graphs = None
            logits = runner.run_step(decoding.step(lengths)).logits.clone()
            runner._graphs = graphs
            # The last block is nobody's.
            results.append([logits, *(tensor[:-1].clone() for tensor in decoding.cache())])
        for own, expected in zip(*results, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
        assert decoding.recorder.replayed[-1] == size


@pytest.mark.long
def test_fed_tokens_reach_their_rows(decoding: Decoding) -> None:
    """The same logits as with the ids that the device knows, and behind a step whose ids were others."""
    runner, lengths = decoding.engine._runner, [7, 13, 20]
    decoding.fill()
    step = decoding.step(lengths)
    expected = runner.run_step(step).logits.clone()
    chosen = torch.tensor([1, step.token_ids[2].item(), 2, step.token_ids[0].item()], device=DEVICE)
    runner.run_step(decoding.step([5, 5, 5], first_block=20))
    decoding.fill()
    step = decoding.step(lengths)
    step.token_ids[[0, 2]] = 0
    step.fed = FedTokens(chosen, np.array([0, 2]), np.array([3, 1]))
    torch.testing.assert_close(runner.run_step(step).logits, expected, rtol=0, atol=0)


@pytest.mark.long
def test_only_steps_that_just_decode_are_replayed(decoding: Decoding) -> None:
    fits, step = decoding.graphs.fits, decoding.step([5, 9])
    assert fits(step)
    assert fits(decoding.step([MAX_LENGTH]))
    assert not fits(decoding.step([MAX_LENGTH + 1]))
    assert fits(decoding.step([2] * MAX_NUM_SEQS))
    assert not fits(decoding.step([2] * (MAX_NUM_SEQS + 1)))
    others: list[Callable[[StepInput], StepInput]] = [
        lambda step: replace(step, scored=[(0, 5, 1)]),
        lambda step: replace(step, embed_rows=torch.tensor([0]), embeds=[torch.zeros(1, 1)]),
        lambda step: replace(step, logits_rows=torch.tensor([0])),
        lambda step: replace(step, query_lengths=[1, 4]),
        lambda step: replace(step, query_lengths=[4, 1]),
        lambda step: replace(step, query_lengths=[1, 4], logits_rows=torch.tensor([0])),
    ]
    assert [fits(change(step)) for change in others] == [False] * len(others)


@pytest.mark.long
def test_the_largest_batch_is_recorded_first(decoding: Decoding) -> None:
    assert decoding.recorder.sizes == [6, 4, 2, 1]


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (32, [1, 2, 4, 8, 16, 24, 32])],
)
def test_sizes_go_up_to_the_largest_batch(max_num_seqs: int, sizes: list[int]) -> None:
    assert batch_sizes(max_num_seqs) == sizes
