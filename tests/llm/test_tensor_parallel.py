"""An engine of two ranks answers like transformers' `generate`; a rank that dies is an error, not a wait."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoProcessor, LlavaForConditionalGeneration

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.loader import load_language_half
from raylens.llm.ranks.lockstep import pack, run_on_all_ranks, stop_ranks, unpack
from raylens.llm.ranks.parallel import FRAME_BYTES, ParallelConfig, ProcessGroup, RankDiedError, connect, listen
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.step_input import StepInput, StepOutput
from raylens.preprocess.schema import ProcessedPrompt
from tests.checkpoint_copies import copy_checkpoint
from tests.llm.ranks import as_rank, engine_of_two, on_both, pool_for_rank_one, silent_rank
from tests.llm.test_llm_engine import PARAMS, QUESTIONS, Case, reshaped_checkpoint, run, tokens

VARIANTS: dict[str, dict[str, Any]] = {
    "two_kv_heads": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48},
    "no_gqa": {"num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 2},
    "tied": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "odd_vocabulary": {"vocab_size": 4099},
}


def engine_config(checkpoint: str, budget: int = 512) -> EngineConfig:
    return EngineConfig(checkpoint, kv_cache_bytes=2**23, max_num_seqs=7, max_num_batched_tokens=budget)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with pool_for_rank_one() as pool:
        yield pool


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, shapes: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = reshaped_checkpoint(folder, shapes, **VARIANTS[request.param])
    if request.param == "tied":
        return copy_checkpoint(checkpoint, tmp_path_factory.mktemp("tied"), without_head)
    return checkpoint


def without_head(name: str) -> str | None:
    return None if "lm_head" in name else name


@pytest.fixture(scope="module")
def cases(checkpoint: str) -> list[Case]:
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == ("tied" in checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint)
    cases = [Case(model, processor, index) for index in range(len(QUESTIONS))]
    assert len({tuple(case.expected) for case in cases}) == len(cases), "answers must depend on the input"
    return cases


def test_a_mixed_batch_equals_generate(pool: ProcessPoolExecutor, checkpoint: str, cases: list[Case]) -> None:
    """Also of shapes of the text model that `test_language_families` has no variant of."""
    with engine_of_two(pool, engine_config(checkpoint, budget=7)) as (engine, group, other):
        for i, case in enumerate(cases):
            engine.add_request(str(i), case.prompt, case.embeddings, PARAMS)
        assert tokens(run(engine)) == {str(i): case.expected for i, case in enumerate(cases)}
        stop_ranks(group)
        other.result(timeout=20)


class PeakMemory:
    """The most resident memory that this process held more than at the start, in bytes; sampled by a thread."""

    def __enter__(self) -> "PeakMemory":
        self._start = self.peak = self._resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak -= self._start

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._resident())

    @staticmethod
    def _resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def load_measured(group: ProcessGroup, checkpoint: str) -> tuple[int, int]:
    """Bytes of the weights that this rank holds, and its peak while loading."""
    with PeakMemory() as memory:
        half, _ = load_language_half(EngineConfig(checkpoint), group)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in half.parameters()}
    return sum(storages.values()), memory.peak


@pytest.fixture(scope="module")
def large_checkpoint(shapes: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """A checkpoint and the bytes of its language half."""
    folder = tmp_path_factory.mktemp("large")
    config = AutoConfig.from_pretrained(shapes)
    text = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 8}
    for name, value in {**text, "num_key_value_heads": 2, "head_dim": 128}.items():
        setattr(config.text_config, name, value)
    model = LlavaForConditionalGeneration(config).to(torch.float32)
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(shapes).save_pretrained(folder)
    parts = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    return str(folder), sum(part.numel() * part.itemsize for part in parts)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of a process")
def test_a_rank_reads_only_its_part_of_the_weights(
    pool: ProcessPoolExecutor, large_checkpoint: tuple[str, int]
) -> None:
    checkpoint, whole = large_checkpoint
    assert whole > 150 * 2**20
    for held, peak in on_both(pool, load_measured, checkpoint):
        assert 0.49 * whole < held < 0.51 * whole
        assert peak < 0.75 * whole


def test_a_checkpoint_without_a_weight_is_refused(shapes: str, tmp_path: Path) -> None:
    copy = copy_checkpoint(shapes, tmp_path, lambda name: None if "layers.2.mlp.up_proj" in name else name)
    with pytest.raises(ValueError, match=r"lacks weights of the language half.*up_proj"):
        load_language_half(EngineConfig(copy), silent_rank(0, 2))


def test_the_second_rank_holds_the_second_half(shapes: str) -> None:
    whole, _ = load_language_half(EngineConfig(shapes))
    parts = [load_language_half(EngineConfig(shapes), silent_rank(rank, 2))[0] for rank in (0, 1)]
    name, dim = "model.language_model.layers.1.mlp.down_proj.weight", 1
    halves = [part.get_parameter(name) for part in parts]
    assert torch.equal(torch.cat(halves, dim), whole.get_parameter(name))


TEXT_PROMPT = ProcessedPrompt([1, 50, 60, 70], [], [])


def step_often(engine: LLMEngine) -> None:
    for _ in range(64):
        engine.step()


def own_process_id() -> int:
    return os.getpid()


def process_id(pool: ProcessPoolExecutor) -> int:
    """Of the pool's process, which has imported this module then."""
    return pool.submit(own_process_id).result(timeout=60)


def test_a_killed_rank_is_an_error_within_the_timeout(shapes: str) -> None:
    with pool_for_rank_one() as pool:
        victim = process_id(pool)
        with engine_of_two(pool, engine_config(shapes), timeout_s=20) as (engine, _, _):
            engine.add_request("r", TEXT_PROMPT, [], SamplingParams(max_tokens=64, ignore_eos=True))
            engine.step()
            os.kill(victim, signal.SIGKILL)
            start = time.monotonic()
            with pytest.raises(RankDiedError, match="failed"):
                step_often(engine)
            assert time.monotonic() - start < 20


@pytest.mark.slow
def test_a_stopped_rank_is_an_error_after_the_timeout(shapes: str) -> None:
    """It is alive, its connections are open, it does not answer."""
    with pool_for_rank_one() as pool:
        victim = process_id(pool)
        with engine_of_two(pool, engine_config(shapes), timeout_s=2) as (engine, _, other):
            engine.add_request("r", TEXT_PROMPT, [], SamplingParams(max_tokens=64, ignore_eos=True))
            engine.step()
            os.kill(victim, signal.SIGSTOP)
            start = time.monotonic()
            try:
                with pytest.raises(RankDiedError, match="failed"):
                    step_often(engine)
                assert 1 < time.monotonic() - start < 10
            finally:
                os.kill(victim, signal.SIGCONT)
            with pytest.raises(RankDiedError):
                other.result(timeout=20)


def send_one_step(group: ProcessGroup) -> None:
    group.send(pack(step_of(1)))
    time.sleep(60)


def receive_for_ever(group: ProcessGroup) -> None:
    while True:
        group.receive()


@pytest.mark.slow
def test_a_waiting_rank_ends_when_rank_0_is_gone(pool: ProcessPoolExecutor) -> None:
    zero, one = ParallelConfig(0, 2, timeout_s=2), ParallelConfig(1, 2, timeout_s=2)
    store = listen(zero)
    with pool_for_rank_one() as pool_of_rank_0:
        victim = process_id(pool_of_rank_0)
        pool_of_rank_0.submit(as_rank, zero, store.port, send_one_step)
        other = pool.submit(as_rank, one, store.port, receive_for_ever)
        with pytest.raises(TimeoutError):
            other.result(timeout=4)  # no step for longer than the timeout: the engine is idle
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(RankDiedError, match="broadcast with the other ranks failed"):
            other.result(timeout=20)


def broken(step: StepInput) -> StepOutput:
    raise KeyError("out of luck")


def fail_a_step(group: ProcessGroup) -> str:
    if group.rank:
        group.receive()
        return ""
    with pytest.raises(RankDiedError) as caught:
        run_on_all_ranks(broken, group, step_of(1))
    return str(caught.value)


def test_a_step_that_fails_on_rank_0_ends_the_group(pool: ProcessPoolExecutor) -> None:
    """Another rank may be waiting in the middle of that step."""
    assert on_both(pool, fail_a_step)[0] == "rank 0 failed within a step: 'out of luck'"


def step_of(num_tokens: int, hidden_size: int = 192) -> StepInput:
    generator = torch.Generator().manual_seed(0)
    integers = torch.arange(num_tokens)
    return StepInput(
        token_ids=integers,
        positions=torch.stack([integers] * 3),
        slot_mapping=integers,
        logits_rows=torch.tensor([num_tokens - 1]),
        embed_rows=integers,
        embeds=[torch.randn(num_tokens, hidden_size, generator=generator).to(torch.bfloat16)] if num_tokens else [],
        block_tables=[list(range(-(-num_tokens // 16))), [3]],
        query_lengths=[num_tokens, 1],
        context_lengths=[num_tokens, 7],
        prompt_lengths=[num_tokens, 5],
        span_members=[(0, 0, i) for i in range(num_tokens)],
        scored=[(i, i + 1, i + 2) for i in range(num_tokens)],
    )


def assert_same(step: StepInput | None, other: StepInput) -> None:
    assert step is not None
    for name in StepInput.__slots__:
        value, expected = getattr(step, name), getattr(other, name)
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
        elif name == "embeds":
            assert len(value) == len(expected)
            assert all(map(torch.equal, value, expected))
        else:
            assert value == expected


@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_a_message_holds_the_step(num_tokens: int) -> None:
    assert_same(unpack(pack(step_of(num_tokens))), step_of(num_tokens))


def exchange(group: ProcessGroup, lengths: list[int]) -> list[StepInput | None]:
    if group.rank == 0:
        for length in lengths:
            group.send(pack(step_of(length)))
        stop_ranks(group)
        return []
    return [unpack(group.receive()) for _ in [*lengths, None]]


def test_messages_of_any_length_arrive(pool: ProcessPoolExecutor) -> None:
    lengths = [1, 600, 2]
    assert pack(step_of(1)).numel() < FRAME_BYTES < pack(step_of(600)).numel()
    _, received = on_both(pool, exchange, lengths)
    *steps, stop = received
    assert stop is None
    for step, length in zip(steps, lengths, strict=True):
        assert_same(step, step_of(length))


def test_nobody_to_connect_to_is_an_error() -> None:
    config = ParallelConfig(0, 2)
    port = listen(config).port  # closed again at once
    with pytest.raises(RankDiedError, match="connect with the other ranks failed"):
        connect(ParallelConfig(1, 2, timeout_s=1), "127.0.0.1", port)


def listening_addresses(group: ProcessGroup) -> set[str]:
    """Hexadecimal addresses that this process accepts connections at."""
    own = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    entries = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    is_listening = "0A"
    return {entry[1].split(":")[0] for entry in entries if entry[3] == is_listening and f"socket:[{entry[9]}]" in own}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets")
def test_ranks_meet_on_loopback_only(pool: ProcessPoolExecutor) -> None:
    loopback = "0100007F"
    assert on_both(pool, listening_addresses) == ({loopback}, {loopback})


@pytest.mark.parametrize(("rank", "world_size", "timeout_s"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 2, 0)])
def test_a_place_that_does_not_exist_is_refused(rank: int, world_size: int, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="rank must be|timeout_s"):
        ParallelConfig(rank, world_size, timeout_s=timeout_s)
