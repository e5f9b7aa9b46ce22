"""For every family, greedy tokens equal those of `generate`, however the engine cuts and mixes the work."""

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from raylens.llm.config import EngineConfig
from raylens.llm.cpu.kernel_attention import KernelAttention
from raylens.llm.engine import LLMEngine
from raylens.llm.layer_types import STATE, has_layers
from raylens.llm.loader import load_language_family, load_language_half
from raylens.llm.model_runner import ModelRunner
from raylens.llm.ranks.lockstep import stop_ranks
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import PromptItem, Sequence
from raylens.modeling.model_configs import load_model_config
from raylens.preprocess.schema import InvalidRequestError, LanguageInputs, PlaceholderRange, ProcessedPrompt
from tests.llm.greedy_answers import PARAMS, answers
from tests.llm.language_variants import VARIANTS, Variant
from tests.llm.ranks import PoolOfRankOne, engine_of_two, silent_rank
from tests.small_models import (
    NUM_TOKENS,
    Json,
    Request,
    make_checkpoint,
    small_requests,
    video_request,
    whole_class,
)
from tests.wemm_reference import names_in_halves

KV_CACHE_BYTES = 2**22
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")


@dataclass(frozen=True)
class Small:
    """A checkpoint with requests to it. `longest_span`: tokens of the longest span of theirs that has to be computed in
    one chunk, 1 without any."""

    variant: Variant
    checkpoint: str
    requests: list[Request]
    longest_span: int = 1

    @property
    def is_divisible(self) -> bool:
        """Whether several ranks can share its layers: none has a recurrent state or attends to cross states."""
        config = load_model_config(self.checkpoint)
        return not has_layers(config.get_text_config(), STATE) and load_language_family(config).cross is None

    def engine(self, **settings: Any) -> LLMEngine:
        return LLMEngine(self.config(**settings))

    def config(self, **settings: Any) -> EngineConfig:
        return EngineConfig(self.checkpoint, **{"kv_cache_bytes": KV_CACHE_BYTES, "max_num_seqs": 7, **settings})


@pytest.fixture(scope="session", params=VARIANTS)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    variant = VARIANTS[request.param]
    checkpoint = variant.checkpoint(tmp_path_factory.mktemp("model"))
    model = whole_class(variant.model_type).from_pretrained(checkpoint, dtype=torch.float32).eval()
    requests = small_requests(variant.model_type, model)
    if variant.model_type in VIDEO_FAMILIES:
        requests += [video_request(variant.model_type, model, num_frames) for num_frames in (4, 6)]
    assert len({tuple(one.expected) for one in requests}) == len(requests), "answers must depend on the input"
    assert all(len(set(one.expected)) > 2 for one in requests), "answers must vary"
    small = Small(variant, checkpoint, requests)
    runner = small.engine(block_size=4)._runner
    layouts = [runner.prompt_layout(one.prompt) for one in requests]
    longest_span = max((span.end - span.start for layout in layouts for span in layout.spans), default=1)
    return replace(small, longest_span=longest_span)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0


def run(engine: LLMEngine, collected: dict[str, Answer]) -> None:
    while engine.has_unfinished():
        for output in engine.step():
            answer = collected[output.request_id]
            answer.token_ids += output.token_ids
            answer.num_cached_tokens = output.num_cached_tokens
    engine.check_integrity()


def expected(small: Small) -> list[list[int]]:
    return [one.expected for one in small.requests]


@pytest.mark.usefixtures("with_kernels")
def test_answers_equal_generate_alone_and_together(small: Small) -> None:
    engine = small.engine(max_num_batched_tokens=2048, prefix_caching=False)
    for one in small.requests:
        assert answers(engine, [one]) == [one.expected]
    assert answers(engine, small.requests) == expected(small)


UNLIKE = ("gemma3", "qwen3_vl")
"""Gemma 3 has windows and attends both ways within pictures. Qwen3-VL has positions of three axes, adds features of
pictures in deeper layers, and takes videos."""
on_unlike_decoders = pytest.mark.parametrize(
    "small",
    [name if name in UNLIKE else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS],
    indirect=True,
)
"""For tests of the engine, whose code is the same for all families: the other families are slow tests."""


@pytest.mark.usefixtures("with_kernels_and_without")
@on_unlike_decoders
@pytest.mark.parametrize("budget", [7, 512])
def test_answers_of_prompts_in_chunks_equal_generate(small: Small, budget: int) -> None:
    """Cuts go up to spans and around them; the longest take a step each, beside those that decode."""
    engine = small.engine(max_num_batched_tokens=budget, largest_item_tokens=max(0, small.longest_span - budget))
    assert answers(engine, small.requests) == expected(small)


def bytes_of_longest(small: Small) -> int:
    """The cache for the longest prompt, its cross states and its answer, in blocks of 4."""
    runner = small.engine(block_size=4)._runner
    num_blocks = 0
    for one in small.requests:
        prompt, source = runner.split_prompt(one.prompt)
        num_blocks = max(num_blocks, -(-(len(prompt.prompt_token_ids) + NUM_TOKENS) // 4))
        if source is not None and source.num_states:
            num_cross_blocks = -(-source.num_states // 4)
            num_blocks = max(num_blocks, -(-num_cross_blocks * runner.num_blocks // runner.num_cross_blocks))
    return num_blocks * (KV_CACHE_BYTES // runner.num_blocks)


@pytest.mark.usefixtures("with_kernels")
@on_unlike_decoders
def test_preempted_answers_equal_generate(small: Small) -> None:
    # Room for the longest alone: the others are thrown out and computed again.
    engine = small.engine(block_size=4, kv_cache_bytes=bytes_of_longest(small), max_num_batched_tokens=2048)
    longest_first = sorted(small.requests, key=lambda one: -len(one.prompt.prompt_token_ids))
    for requests in (small.requests, longest_first):
        assert answers(engine, requests) == [one.expected for one in requests]
    assert engine.stats.num_preemptions > 0


@on_unlike_decoders
def test_answers_of_steps_launched_ahead_equal_generate(small: Small) -> None:
    """Alone, and together with few blocks: some are preempted while a token of theirs is pending."""
    engine = small.engine(
        block_size=4,
        kv_cache_bytes=bytes_of_longest(small),
        max_num_batched_tokens=max(7, small.longest_span + 6),
        prompt_lookup=False,
        async_scheduling=True,
    )
    assert answers(engine, small.requests[:1]) == expected(small)[:1]
    for _ in range(2):  # the second time their beginnings are cached
        assert answers(engine, small.requests) == expected(small)
    assert engine.stats.num_preemptions > 0


@on_unlike_decoders
def test_answers_with_cached_beginnings_equal_generate(small: Small) -> None:
    engine = small.engine(block_size=4, max_num_batched_tokens=2048)
    for _ in range(2):
        assert answers(engine, small.requests) == expected(small)
    for one in small.requests:
        collected = {"again": Answer()}
        engine.add_request("again", one.prompt, one.embeddings, PARAMS)
        run(engine, collected)
        assert collected["again"].token_ids == one.expected
        if engine._runner.prompt_layout(one.prompt).is_prefix_cacheable:
            own, _ = engine._runner.split_prompt(one.prompt)
            assert collected["again"].num_cached_tokens > (len(own.prompt_token_ids) - 1) // 4 * 4 - 4
        else:
            assert not collected["again"].num_cached_tokens


@on_unlike_decoders
def test_answers_beside_aborted_neighbours_equal_generate(small: Small) -> None:
    engine = small.engine(block_size=4, max_num_batched_tokens=2**14, max_num_seqs=64, kv_cache_bytes=2**23)
    collected: dict[str, Answer] = {}
    for index, one in enumerate(small.requests):
        for kind in ("stays", *(f"goes after {steps}" for steps in (0, 1, 3))):
            collected[f"{index} {kind}"] = Answer()
            engine.add_request(f"{index} {kind}", one.prompt, one.embeddings, PARAMS)
    for steps in range(4):
        for name in collected:
            if name.endswith(f"goes after {steps}"):
                engine.abort(name)
        for output in engine.step():
            collected[output.request_id].token_ids += output.token_ids
    run(engine, collected)
    for index, one in enumerate(small.requests):
        assert collected[f"{index} stays"].token_ids == one.expected
        assert [len(collected[f"{index} goes after {steps}"].token_ids) for steps in (0, 1, 3)] == [0, 1, 3]


@on_unlike_decoders
def test_answers_whose_embeddings_come_late_equal_generate(small: Small) -> None:
    engine = small.engine(max_num_batched_tokens=2048)
    collected: dict[str, Answer] = {}
    for index, one in enumerate(small.requests):
        collected[str(index)] = Answer()
        engine.add_request(str(index), one.prompt, [None] * len(one.embeddings), PARAMS)
    for item in range(max(len(one.embeddings) for one in small.requests)):
        for index, one in enumerate(small.requests):
            if item < len(one.embeddings):
                engine.set_embeddings(str(index), item, one.embeddings[item])
                for output in engine.step():
                    collected[output.request_id].token_ids += output.token_ids
    run(engine, collected)
    assert [answer.token_ids for answer in collected.values()] == expected(small)


@pytest.fixture(scope="module")
def pools() -> Iterator[PoolOfRankOne]:
    pools = PoolOfRankOne()
    yield pools
    pools.shutdown()


@pytest.fixture
def pool(pools: PoolOfRankOne) -> ProcessPoolExecutor:
    return pools.usable()


@pytest.mark.long
@on_unlike_decoders
def test_answers_of_two_ranks_equal_generate(small: Small, pool: ProcessPoolExecutor) -> None:
    budget = max(7, small.longest_span + 6)
    if not small.is_divisible:
        with pytest.raises(ValueError, match=r"(layers with a recurrent state are|cross attention is) not divided"):
            ModelRunner(small.config(), silent_rank(0, 2))
        return
    with engine_of_two(pool, small.config(max_num_batched_tokens=budget, block_size=4)) as (engine, group, other):
        assert answers(engine, small.requests) == expected(small)
        stop_ranks(group)
        other.result(timeout=20)


@pytest.mark.gpu
@pytest.mark.parametrize("has_graphs", [True, False])
def test_answers_on_a_gpu_equal_generate(small: Small, has_graphs: bool) -> None:
    for budget, is_ahead in product((2048, max(7, small.longest_span + 6)), (True, False)):
        engine = small.engine(device="cuda", max_num_batched_tokens=budget, block_size=4, async_scheduling=is_ahead)
        if not has_graphs:
            engine._runner._graphs = None
        for one in small.requests:
            assert answers(engine, [one]) == [one.expected]
        assert answers(engine, small.requests) == expected(small)


@pytest.mark.gpu
def test_decoding_on_a_gpu_is_recorded(small: Small) -> None:
    assert small.engine(device="cuda")._runner._graphs is not None


def test_logits_are_those_of_the_whole_model(small: Small) -> None:
    runner = ModelRunner(EngineConfig(small.checkpoint, kv_cache_bytes=2**22, max_num_batched_tokens=2048))
    for one in small.requests:
        prompt, source = runner.split_prompt(one.prompt)
        num_tokens = len(prompt.prompt_token_ids)
        sequence = Sequence(
            request_id="r",
            token_ids=list(prompt.prompt_token_ids),
            num_prompt_tokens=num_tokens,
            items=[
                PromptItem(mm_hash, placeholder.embed_positions() if source is None else (), embeddings)
                for placeholder, mm_hash, embeddings in zip(
                    one.prompt.placeholders, prompt.mm_hashes, one.embeddings, strict=True
                )
            ],
            max_num_tokens=num_tokens + NUM_TOKENS,
            layout=runner.prompt_layout(prompt),
            block_table=list(range(num_tokens)),
            cross_source=source,
            cross_table=list(range(runner.num_cross_blocks)),
        )
        (logits,) = runner.run([ScheduledChunk(sequence, num_tokens)]).logits
        torch.testing.assert_close(logits, one.logits, rtol=1e-4, atol=1e-4)


KEPT = (
    *("lm_head.", "language_model.lm_head.", "language_model.output."),
    # A few rows of the vision half.
    *("model.image_newline", "query_tokens"),
    # Tables of tokens that are not text, as the one that ends a picture.
    *("model.embed_vision.", "model.embed_audio."),
    # What reads the prompt for the decoder.
    *("model.language_model.encoder.", "model.language_model.shared."),
)
"""Of the language half, beside the decoder."""


@pytest.mark.long
def test_layers_that_look_into_a_cache_have_none_of_their_own(tmp_path: Path) -> None:
    runner = ModelRunner(EngineConfig(VARIANTS["gemma3n"].checkpoint(tmp_path), kv_cache_bytes=2**22))
    assert isinstance(runner._attention, KernelAttention)
    assert runner._model.config.text_config.num_hidden_layers == 6
    assert len(runner._attention.caches) == 4


def parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """By their names in the half that has them."""
    named = dict(model.named_parameters())
    return dict(zip(names_in_halves(named), named.values(), strict=True))


def test_only_the_language_half_is_loaded(small: Small) -> None:
    half, family = load_language_half(EngineConfig(small.checkpoint))
    whole = whole_class(small.variant.model_type).from_pretrained(small.checkpoint, dtype=torch.float32)
    own, rest = parameters(half), parameters(whole)
    assert all(torch.equal(value, rest.pop(name)) for name, value in own.items())
    assert all(name.startswith((f"{family.decoder}.", *KEPT)) for name in own)
    assert not any("vqmodel" in name for name in own)
    assert rest
    assert not any(name.startswith(("lm_head", "model.language_model.", "model.layers.")) for name in rest)


@pytest.mark.parametrize("name", ["qwen3_vl, tied", "gemma3"])
def test_tied_weights_stay_one(tmp_path: Path, name: str) -> None:
    half, _ = load_language_half(EngineConfig(VARIANTS[name].checkpoint(tmp_path)))
    assert half.get_output_embeddings().weight is half.get_input_embeddings().weight


GRID = {"image_grid_thw": np.array([[1, 4, 4]])}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **FACTORS}


@pytest.mark.parametrize(
    ("token_ids", "placeholders", "grid"),
    [
        ([5, *[9] * 8, 6], [PlaceholderRange(1, 4), PlaceholderRange(5, 4)], GRID),
        ([5, *[9] * 3, 6], [PlaceholderRange(1, 3)], GRID),
    ],
)
def test_items_that_do_not_fit_their_placeholders_are_refused(
    tmp_path: Path, token_ids: list[int], placeholders: list[PlaceholderRange], grid: LanguageInputs
) -> None:
    engine = LLMEngine(EngineConfig(make_checkpoint("qwen2_vl", tmp_path)))
    count = len(placeholders)
    prompt = ProcessedPrompt(token_ids, placeholders, ["h"] * count, [grid] * count)
    embeddings = [torch.zeros(placeholder.num_embeds, 32) for placeholder in placeholders]
    with pytest.raises(InvalidRequestError, match="do not fit"):
        engine.add_request("r", prompt, embeddings, PARAMS)
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("text_config", "reason"),
    [
        ({"layer_types": ["indexed_attention", "full_attention"]}, "indexed_attention"),
        ({"model_type": "lfm2", "layer_types": ["conv"] * 2}, "no layer has a KV cache"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"rope_parameters": LONGROPE}, "longrope"),
    ],
)
def test_text_models_that_cannot_work_are_refused(tmp_path: Path, text_config: Json, reason: str) -> None:
    folder = make_checkpoint("llava", tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["text_config"].update(text_config)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rf"not supported: .*{reason}"):
        LLMEngine(EngineConfig(folder))


def test_other_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ValueError, match=r"'clip'.*only \['aria'"):
        LLMEngine(EngineConfig(str(tmp_path)))
