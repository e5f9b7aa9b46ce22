"""Compiled layers compute what the layers themselves do, for all families. Here for the CPU; on a GPU only they run, so
that `test_language_families` tests them there."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from raylens.cpu_kernels.library import VARIABLE
from raylens.llm.cache_size import worst_step
from raylens.llm.config import DtypeName, EngineConfig
from raylens.llm.cuda.compiled_layers import compile_layers
from raylens.llm.engine import LLMEngine
from raylens.llm.model_runner import ModelRunner
from raylens.llm.ranks.parallel import ProcessGroup, RankDiedError
from raylens.llm.step_input import TENSORS, StepInput
from raylens.modeling.merged_linear import merge_linear_layers
from tests.llm.attention_reference import BLOCK_SIZE
from tests.llm.greedy_answers import answers
from tests.llm.language_variants import VARIANTS
from tests.llm.ranks import on_both, pool_for_rank_one
from tests.small_models import make_checkpoint, small_requests, whole_class

pytest.importorskip("triton")

from tests.llm.graph_recorder import Recorder, make_attention, with_graphs

MAX_NUM_TOKENS = 512


def copied(step: StepInput, device: torch.device) -> StepInput:
    """As to a GPU: inference mode's own tensors, which is one of the things that compiled code is bound to."""
    tensors = {name: getattr(step, name).to(device, copy=True) for name in TENSORS}
    return replace(step, **tensors, embeds=[piece.to(device, copy=True) for piece in step.embeds])


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    with patch("raylens.llm.model_runner.pack_language_half"), patch.object(StepInput, "to", copied):
        yield
    torch.compiler.reset()


def make_config(checkpoint: str, dtype: DtypeName = "float32") -> EngineConfig:
    return EngineConfig(
        checkpoint,
        dtype=dtype,
        kv_cache_bytes=2**22,
        block_size=BLOCK_SIZE,
        max_num_seqs=7,
        max_num_batched_tokens=MAX_NUM_TOKENS,
    )


def compile_runner(runner: ModelRunner) -> None:
    """What a runner on a GPU does with itself."""
    merge_linear_layers(runner._decoder, runner._probe_layers)
    runner._compile_layers()


@pytest.mark.slow
# Decoders with cross attention run without the compiler.
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("florence2", "mllama")])
def test_answers_equal_generate_and_wait_for_no_compiler(tmp_path: Path, name: str) -> None:
    checkpoint = VARIANTS[name].checkpoint(tmp_path)
    model_type = VARIANTS[name].model_type
    model = whole_class(model_type).from_pretrained(checkpoint, dtype=torch.float32).eval()
    requests = small_requests(model_type, model)
    engine = LLMEngine(make_config(checkpoint))
    compile_runner(engine._runner)
    assert (num_compiled := counters["stats"]["unique_graphs"]) > 0
    # For as many tokens as it has heads, Chameleon's norm of heads is compiled once more.
    stance = "default" if name == "chameleon" else "fail_on_recompile"
    # Steps run on another thread than the one that made the engine.
    with torch.compiler.set_stance(stance), ThreadPoolExecutor(1) as thread:
        assert thread.submit(answers, engine, requests).result() == [one.expected for one in requests]
        for one in requests:
            assert thread.submit(answers, engine, [one]).result() == [one.expected]
    assert counters["stats"]["unique_graphs"] == num_compiled or name == "chameleon"


@torch.inference_mode()
def hidden_states(runner: ModelRunner, num_tokens: int) -> torch.Tensor:
    """Of a prompt in the first blocks of the cache."""
    blocks = list(range(-(-num_tokens // BLOCK_SIZE)))
    step = worst_step(
        num_tokens=num_tokens,
        num_positions=num_tokens,
        num_logits=1,
        num_rope_axes=1,
        block_size=BLOCK_SIZE,
        is_span=False,
    )
    tokens = torch.arange(num_tokens)
    step = replace(step, token_ids=tokens % 50, slot_mapping=tokens, block_tables=[blocks]).to(torch.device("cpu"))
    return runner.forward(step, runner._attention.prepare(step))[0]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["paligemma 2", "llava"])
def test_steps_are_recorded_and_wait_for_no_compiler(tmp_path: Path, name: str) -> None:
    model_type = VARIANTS[name].model_type
    checkpoint = VARIANTS[name].checkpoint(tmp_path)
    model = whole_class(model_type).from_pretrained(checkpoint, dtype=torch.float32).eval()
    requests = small_requests(model_type, model)
    engine, recorder = LLMEngine(make_config(checkpoint)), Recorder()
    runner = engine._runner
    with patch.object(runner, "_make_attention", lambda num: make_attention(runner, num)):
        compile_runner(runner)
    assert (num_compiled := counters["stats"]["unique_graphs"]) > 0
    with torch.compiler.set_stance("fail_on_recompile"), torch.inference_mode():
        with_graphs(engine._runner, recorder)
        runner._run_first_steps()
        # Few tokens: Triton's interpreter is slow.
        assert answers(engine, requests, num_tokens=6) == [one.expected[:6] for one in requests]
    assert recorder.replayed
    assert counters["stats"]["unique_graphs"] == num_compiled


@pytest.mark.slow
def test_numbers_are_rounded_where_the_layers_round_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")  # the kernels would compute in float32
    config = make_config(make_checkpoint("llava", tmp_path), "bfloat16")
    runner = ModelRunner(config)
    # Not what is compared here: a merged product may sum in another order.
    merge_linear_layers(runner._decoder, runner._probe_layers)
    plain = [hidden_states(runner, num_tokens) for num_tokens in (300, 2, 1)]
    compile_runner(runner)
    compiled = [hidden_states(runner, num_tokens) for num_tokens in (300, 2, 1)]
    assert all(map(torch.equal, compiled, plain))


def compile_share(group: ProcessGroup, checkpoint: str) -> float:
    """How far hidden states are at most from those before the rank compiled its layers."""
    with patch("raylens.llm.model_runner.pack_language_half"), patch.object(StepInput, "to", copied):
        config = make_config(checkpoint)
        runner = ModelRunner(config, group)
        plain = hidden_states(runner, 40)
        compile_runner(runner)
        assert counters["stats"]["unique_graphs"] > 0
        return float((hidden_states(runner, 40) - plain).abs().max())


@pytest.mark.slow
def test_ranks_compile_their_parts(tmp_path: Path) -> None:
    pool = pool_for_rank_one()
    try:
        assert max(on_both(pool, compile_share, make_checkpoint("llava", tmp_path))) < 1e-5
    finally:
        pool.shutdown()


@pytest.mark.long
def test_layers_that_cannot_be_compiled_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = whole_class("llava").from_pretrained(checkpoint := make_checkpoint("llava", tmp_path)).eval()
    requests = small_requests("llava", model)
    engine = LLMEngine(make_config(checkpoint))
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        compile_runner(engine._runner)
    assert "cannot be compiled" in caplog.text
    with torch.compiler.set_stance("fail_on_recompile"):
        assert answers(engine, requests) == [one.expected for one in requests]


@pytest.mark.parametrize(("max_num_tokens", "sizes"), [(512, [13, 511, 1]), (8, [7, 1]), (13, [13, 1]), (1, [1])])
def test_layers_are_compiled_for_one_token_and_for_more(max_num_tokens: int, sizes: list[int]) -> None:
    run: list[int] = []
    compile_layers(torch.nn.Module(), run.append, max_num_tokens, is_one_of_several=False)
    assert run == sizes


@pytest.mark.parametrize("error", [RankDiedError("all_reduce failed"), torch.OutOfMemoryError("out of memory")])
def test_what_is_no_matter_of_the_compiler_is_raised(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        compile_layers(torch.nn.Module(), Mock(side_effect=error), MAX_NUM_TOKENS, is_one_of_several=False)


def test_a_rank_that_cannot_compile_does_not_go_on_alone() -> None:
    with pytest.raises(RuntimeError, match="TORCH_COMPILE_DISABLE=1"):
        compile_layers(torch.nn.Module(), Mock(side_effect=ValueError), MAX_NUM_TOKENS, is_one_of_several=True)
