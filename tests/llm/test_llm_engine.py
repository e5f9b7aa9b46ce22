"""Greedy tokens equal those of transformers' `generate`, however the engine cuts and mixes the work."""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoProcessor, LlavaForConditionalGeneration

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.loader import load_language_half
from raylens.llm.outputs import RequestOutput
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.step_input import StepOutput
from raylens.preprocess.media import MediaLimits, decode_image
from raylens.preprocess.schema import InvalidRequestError, PlaceholderRange, ProcessedPrompt
from tests.checkpoint_copies import copy_checkpoint
from tests.pictures import disc, encoded

NUM_TOKENS = 24
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
QUESTIONS = [
    (1, "What colour is the circle?"),
    (0, "Who are you?"),
    (3, "What is in the second image?"),
    (2, "Describe the first image."),
    (1, "Describe the picture."),
    (0, "Hello"),
]
COLOURS = ["red", "green", "blue", "yellow", "purple", "orange"]


class Case:
    """One request with its embeddings and what `generate` answers to it."""

    def __init__(self, model: Any, processor: Any, index: int) -> None:
        num_images, question = QUESTIONS[index]
        files = [encoded(disc(COLOURS[(index + i) % 6], corner=(8 + 30 * i, 60))) for i in range(num_images)]
        pictures = [decode_image(file, limits=MediaLimits()) for file in files]
        content = [{"type": "image"}] * num_images + [{"type": "text", "text": question}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=text, images=pictures or None, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(
                **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )
            self.embeddings = (
                model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output if num_images else []
            )
        token_ids = inputs["input_ids"][0].tolist()
        self.expected = output[0, len(token_ids) :].tolist()
        first = token_ids.index(3) if num_images else 0
        starts = [first + i * (36 + len(processor.tokenizer("\n")["input_ids"]) - 1) for i in range(num_images)]
        assert all(token_ids[start : start + 36] == [3] * 36 for start in starts)
        placeholders = [PlaceholderRange(start, 36) for start in starts]
        self.prompt = ProcessedPrompt(token_ids, placeholders, [sha256(file).hexdigest() for file in files])


def reshaped_checkpoint(folder: Path, shapes: str, **text_config: Any) -> str:
    """A checkpoint with random weights of another shape. Spread out more than transformers draws them: with its
    own initialisation greedy answers hardly depend on the picture."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(shapes)
    for name, value in text_config.items():
        setattr(config.text_config, name, value)
    model = LlavaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name or "projector" in name:
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(shapes).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(shapes: str) -> str:
    """The bundled one; `test_language_families` goes through every family and other shapes of text models."""
    return shapes


@pytest.fixture(scope="module")
def cases(checkpoint: str) -> list[Case]:
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(checkpoint)
    cases = [Case(model, processor, index) for index in range(len(QUESTIONS))]
    assert len({tuple(case.expected) for case in cases}) == len(cases), "answers must depend on the input"
    return cases


def make_engine(checkpoint: str, **settings: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(checkpoint, **{"kv_cache_bytes": 2**24, "max_num_seqs": 7, **settings}))


def run(engine: LLMEngine) -> Iterator[RequestOutput]:
    while engine.has_unfinished():
        yield from engine.step()
    engine.check_integrity()
    assert engine.stats.kv_cache_usage == 0


def tokens(outputs: Iterator[RequestOutput]) -> dict[str, list[int]]:
    collected: dict[str, list[int]] = {}
    for output in outputs:
        collected.setdefault(output.request_id, []).extend(output.token_ids)
    return collected


@pytest.mark.parametrize("budget", [7, 512])
def test_each_alone_equals_generate(checkpoint: str, cases: list[Case], budget: int) -> None:
    engine = make_engine(checkpoint, max_num_batched_tokens=budget)
    for case in cases:
        engine.add_request("r", case.prompt, case.embeddings, PARAMS)
        assert tokens(run(engine)) == {"r": case.expected}


@pytest.mark.parametrize("budget", [7, 64, 512])
@pytest.mark.parametrize("block_size", [1, 16])
def test_a_mixed_batch_equals_generate(checkpoint: str, cases: list[Case], budget: int, block_size: int) -> None:
    engine = make_engine(checkpoint, max_num_batched_tokens=budget, block_size=block_size)
    for i, case in enumerate(cases):
        engine.add_request(str(i), case.prompt, case.embeddings, PARAMS)
    assert tokens(run(engine)) == {str(i): case.expected for i, case in enumerate(cases)}


def test_preempted_sequences_equal_generate(checkpoint: str, cases: list[Case]) -> None:
    # Room for the longest alone and a little more: the others are thrown out and computed again.
    longest = max(len(case.prompt.prompt_token_ids) for case in cases) + NUM_TOKENS
    probe = make_engine(checkpoint)
    block_bytes = 2**24 // probe._runner.num_blocks
    engine = make_engine(checkpoint, kv_cache_bytes=(longest // 16 + 3) * block_bytes)
    for i, case in enumerate(cases):
        engine.add_request(str(i), case.prompt, case.embeddings, PARAMS)
    assert tokens(run(engine)) == {str(i): case.expected for i, case in enumerate(cases)}
    assert engine.stats.num_preemptions > 0


def test_aborted_neighbours_change_nothing(checkpoint: str, cases: list[Case]) -> None:
    engine = make_engine(checkpoint, max_num_batched_tokens=64)
    for i, case in enumerate(cases):
        engine.add_request(str(i), case.prompt, case.embeddings, PARAMS)
    collected: dict[str, list[int]] = {}
    for step in range(10_000):
        if not engine.has_unfinished():
            break
        for output in engine.step():
            collected.setdefault(output.request_id, []).extend(output.token_ids)
        if step in (0, 3, 6):
            engine.abort(str(step // 3 * 2))
            engine.check_integrity()
    assert {name: collected[name] for name in "135"} == {name: cases[int(name)].expected for name in "135"}


def test_late_arrivals_change_nothing(checkpoint: str, cases: list[Case]) -> None:
    engine = make_engine(checkpoint, max_num_batched_tokens=32)
    waiting = list(enumerate(cases))
    collected: dict[str, list[int]] = {}
    while waiting or engine.has_unfinished():
        if waiting:
            index, case = waiting.pop(0)
            engine.add_request(str(index), case.prompt, case.embeddings, PARAMS)
        for output in engine.step():
            collected.setdefault(output.request_id, []).extend(output.token_ids)
    assert collected == {str(i): case.expected for i, case in enumerate(cases)}


@pytest.mark.parametrize("budget", [7, 512])
def test_a_cached_prefix_changes_nothing(checkpoint: str, cases: list[Case], budget: int) -> None:
    engine = make_engine(checkpoint, max_num_batched_tokens=budget)
    expected = {str(i): case.expected for i, case in enumerate(cases)}
    for is_repeated in (False, True):
        outputs = []
        for i, case in enumerate(cases):
            engine.add_request(str(i), case.prompt, case.embeddings, PARAMS)
            outputs += list(run(engine))
        assert tokens(iter(outputs)) == expected
        cached = {output.request_id: output.num_cached_tokens for output in outputs}
        if is_repeated:
            lengths = {str(i): len(case.prompt.prompt_token_ids) for i, case in enumerate(cases)}
            assert cached == {name: (length - 1) // 16 * 16 for name, length in lengths.items()}


def test_an_answer_is_part_of_what_the_next_turn_finds(checkpoint: str, cases: list[Case]) -> None:
    engine = make_engine(checkpoint)
    prompt, embeddings = cases[0].prompt, cases[0].embeddings
    engine.add_request("first", prompt, embeddings, PARAMS)
    list(run(engine))
    longer = [*prompt.prompt_token_ids, *cases[0].expected]
    engine.add_request("next", replace(prompt, prompt_token_ids=longer), embeddings, PARAMS)
    assert next(run(engine)).num_cached_tokens == (len(longer) - 1) // 16 * 16


def test_tenants_share_no_prefix(checkpoint: str, cases: list[Case]) -> None:
    engine = make_engine(checkpoint)
    for salt, is_cached in (("mine", False), ("other", False), ("mine", True)):
        engine.add_request("r", cases[0].prompt, cases[0].embeddings, PARAMS, cache_salt=salt)
        assert ({output.num_cached_tokens > 0 for output in run(engine)}) == {is_cached}


def test_without_prefix_caching_every_prompt_is_computed(checkpoint: str, cases: list[Case]) -> None:
    engine = make_engine(checkpoint, prefix_caching=False)
    for _ in range(2):
        engine.add_request("r", cases[0].prompt, cases[0].embeddings, PARAMS)
        assert {output.num_cached_tokens for output in run(engine)} == {0}


@pytest.mark.parametrize("budget", [7, 512])
def test_items_may_arrive_late_and_in_any_order(checkpoint: str, cases: list[Case], budget: int) -> None:
    engine = make_engine(checkpoint, max_num_batched_tokens=budget)
    for i, case in enumerate(cases):
        engine.add_request(str(i), case.prompt, [None] * len(case.embeddings), PARAMS)
    outputs = []
    late = [(str(i), item, rows) for i, case in enumerate(cases) for item, rows in enumerate(case.embeddings)]
    for name, item, embeddings in reversed(late):
        while not engine.is_idle:
            outputs += engine.step()
        engine.set_embeddings(name, item, embeddings)
    outputs += list(run(engine))
    assert tokens(iter(outputs)) == {str(i): case.expected for i, case in enumerate(cases)}


def test_an_answer_waits_for_an_item_in_a_cached_prefix(checkpoint: str, cases: list[Case]) -> None:
    """It may be needed yet, and may fail; the prompt is not computed again for that."""
    engine = make_engine(checkpoint, block_size=1)
    case = cases[0]
    engine.add_request("r", case.prompt, case.embeddings, PARAMS)
    assert tokens(run(engine)) == {"r": case.expected}
    engine.add_request("r", case.prompt, [None], PARAMS)
    while not engine.is_idle:
        assert engine.step() == []
    engine.set_embeddings("r", 0, case.embeddings[0])
    outputs = list(run(engine))
    assert tokens(iter(outputs)) == {"r": case.expected}
    assert outputs[0].num_cached_tokens == len(case.prompt.prompt_token_ids) - 1


def test_several_answers_compute_the_prompt_once(checkpoint: str, cases: list[Case]) -> None:
    engine = make_engine(checkpoint, prefix_caching=False, max_num_seqs=2)
    prompt_tokens = 0
    for i, case in enumerate(cases):
        engine.add_request(str(i), case.prompt, case.embeddings, replace(PARAMS, n=3))
        prompt_tokens += len(case.prompt.prompt_token_ids)
    answers: dict[tuple[str, int], list[int]] = {}
    num_computed = 0
    for output in run(engine):
        answers.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        if output.num_output_tokens == 1:
            num_computed += output.num_prompt_tokens - output.num_cached_tokens
    assert answers == {(str(i), n): case.expected for i, case in enumerate(cases) for n in range(3)}
    assert num_computed <= prompt_tokens + len(cases) * 2 * 16


def test_aborting_a_request_ends_all_its_answers(checkpoint: str, cases: list[Case]) -> None:
    engine = make_engine(checkpoint)
    engine.add_request("r", cases[0].prompt, cases[0].embeddings, replace(PARAMS, n=3))
    for _ in range(4):
        engine.step()
    engine.abort("r")
    assert not engine.has_unfinished()
    assert engine.stats.kv_cache_usage == 0


@pytest.fixture(scope="module")
def engine(shapes: str) -> LLMEngine:
    return make_engine(shapes, max_model_len=128)


TEXT_PROMPT = ProcessedPrompt([1, 50, 60, 70], [], [])


def ask(engine: LLMEngine, params: SamplingParams, prompt: ProcessedPrompt = TEXT_PROMPT) -> list[RequestOutput]:
    engine.add_request("r", prompt, [], params)
    return list(run(engine))


def test_max_tokens_respected(engine: LLMEngine) -> None:
    outputs = ask(engine, SamplingParams(max_tokens=5, ignore_eos=True))
    assert (outputs[-1].num_output_tokens, outputs[-1].finish_reason) == (5, "length")


@pytest.mark.parametrize("num_answers", [1, 3])
def test_a_request_for_no_tokens_ends_when_its_prompt_is_computed(engine: LLMEngine, num_answers: int) -> None:
    """Beside one that goes on; its prompt stays in the prefix cache."""
    prompt = ProcessedPrompt([1, *range(40, 100 + num_answers)], [], [])
    engine.add_request("other", TEXT_PROMPT, [], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    params = SamplingParams(max_tokens=0, n=num_answers, prompt_logprobs=1)
    engine.add_request("r", prompt, [], params)
    outputs = list(run(engine))
    ended = sorted((one for one in outputs if one.request_id == "r"), key=lambda one: one.index)
    assert [(one.index, one.token_ids, one.num_output_tokens, one.finish_reason) for one in ended] == [
        (index, [], 0, "length") for index in range(num_answers)
    ]
    assert len(ended[0].prompt_logprobs) == len(prompt.prompt_token_ids) - 1
    assert [one.token_ids[0] for one in outputs if one.request_id == "other"] == [
        one.token_ids[0] for one in ask(engine, SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    ]
    assert ask(engine, SamplingParams(max_tokens=1), prompt)[-1].num_cached_tokens > 32


@pytest.mark.parametrize("max_tokens", [None, 125, 128])
def test_the_context_ends_an_answer_that_does_not_fit_beside_the_prompt(
    engine: LLMEngine, max_tokens: int | None
) -> None:
    outputs = ask(engine, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert (outputs[-1].num_output_tokens, outputs[-1].finish_reason) == (124, "length")


def test_the_same_seed_gives_the_same_tokens(engine: LLMEngine) -> None:
    params = [SamplingParams(max_tokens=20, temperature=1.5, seed=seed, ignore_eos=True) for seed in (1, 1, 2)]
    first, again, other = ([output.token_ids for output in ask(engine, one)] for one in params)
    assert first == again != other


@pytest.mark.parametrize(
    ("prompt", "embeddings", "params", "field"),
    [
        (ProcessedPrompt([1] * 128, [], []), [], SamplingParams(), "messages"),
        (ProcessedPrompt([], [], []), [], SamplingParams(), "messages"),
        (TEXT_PROMPT, [], SamplingParams(max_tokens=129), "max_tokens"),
        (TEXT_PROMPT, [], SamplingParams(min_tokens=2**70), "min_tokens"),
        (TEXT_PROMPT, [torch.zeros(1, 192)], SamplingParams(), "messages"),
        (ProcessedPrompt([3, 3], [PlaceholderRange(0, 2)], ["h"]), [torch.zeros(1, 192)], SamplingParams(), "messages"),
        (ProcessedPrompt([3, 3], [PlaceholderRange(0, 2)], ["h"]), [torch.zeros(2, 64)], SamplingParams(), "messages"),
    ],
)
def test_requests_that_can_never_run_are_refused(
    engine: LLMEngine, prompt: ProcessedPrompt, embeddings: list[torch.Tensor], params: SamplingParams, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request("bad", prompt, embeddings, params)
    assert caught.value.field == field
    assert not engine.has_unfinished()
    assert ask(engine, SamplingParams(max_tokens=1))[-1].finish_reason is not None


def test_a_failing_step_ends_its_requests_and_nothing_else(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add_request("bad", TEXT_PROMPT, [], SamplingParams(max_tokens=3))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda *_: 1 / 0)
        (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == ("bad", "error")
    assert ask(engine, SamplingParams(max_tokens=2, ignore_eos=True))[-1].finish_reason == "length"


@pytest.mark.parametrize("is_entered", [False, True])
def test_steps_run_in_inference_mode(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, is_entered: bool) -> None:
    """Compiled layers and recorded steps are bound to it."""
    compute, modes = engine._runner.run, []

    def run(chunks: list[ScheduledChunk], chosen: torch.Tensor | None) -> StepOutput:
        modes.append(torch.is_inference_mode_enabled())
        return compute(chunks, chosen)

    monkeypatch.setattr(engine._runner, "run", run)
    with torch.inference_mode(is_entered):
        ask(engine, PARAMS)
    assert modes
    assert all(modes)


def test_no_sampling_setting_harms_the_neighbours(engine: LLMEngine) -> None:
    settings = [
        SamplingParams(max_tokens=6, min_tokens=3),
        SamplingParams(max_tokens=6, temperature=1e-40, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=1.0, top_p=1e-300, top_k=1, seed=0, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
    ]
    for i, params in enumerate(settings):
        engine.add_request(str(i), TEXT_PROMPT, [], params)
    outputs = {output.request_id: output for output in run(engine)}
    assert outputs["0"].num_output_tokens >= 3
    assert [outputs[name].num_output_tokens for name in "123"] == [6, 6, 6]
    assert all(output.finish_reason in ("stop", "length") for output in outputs.values())


def test_embeddings_of_nan_end_their_own_request_only(engine: LLMEngine) -> None:
    prompt = ProcessedPrompt([1, 3, 3, 50], [PlaceholderRange(1, 2)], ["h"])
    engine.add_request("bad", prompt, [torch.full((2, 192), torch.nan)], SamplingParams(max_tokens=4))
    engine.add_request("good", TEXT_PROMPT, [], SamplingParams(max_tokens=4, ignore_eos=True))
    reasons = {output.request_id: output.finish_reason for output in run(engine)}
    assert reasons == {"bad": "error", "good": "length"}


def test_what_nan_was_computed_from_is_not_taken_up_by_others(engine: LLMEngine) -> None:
    prompt = ProcessedPrompt([1, 3, 3, *range(50, 90)], [PlaceholderRange(1, 2)], ["same"])
    for value, reason in ((torch.nan, "error"), (0.5, "length")):
        engine.add_request("r", prompt, [torch.full((2, 192), value)], SamplingParams(max_tokens=4, ignore_eos=True))
        assert list(run(engine))[-1].finish_reason == reason


@pytest.mark.long
@pytest.mark.parametrize("budget", [7, 512])
def test_only_masked_positions_take_embeddings(shapes: str, budget: int) -> None:
    """Three items of one row each are the same as one item of three rows with gaps between them."""
    ids = [1, 50, 3, 51, 3, 52, 53, 3, 60, 61]
    rows = torch.randn(3, 192, generator=torch.Generator().manual_seed(0))
    mask = (True, False, True, False, False, True)
    gaps = ProcessedPrompt(ids, [PlaceholderRange(2, 6, mask)], ["h"])
    apart = ProcessedPrompt(ids, [PlaceholderRange(i, 1) for i in (2, 4, 7)], ["a", "b", "c"])
    engine = LLMEngine(EngineConfig(shapes, max_num_seqs=4, max_num_batched_tokens=budget))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine.add_request("gaps", gaps, [rows], params)
    engine.add_request("apart", apart, [row.unsqueeze(0) for row in rows], params)
    engine.add_request("none", ProcessedPrompt(ids, [], []), [], params)
    tokens: dict[str, list[int]] = {"gaps": [], "apart": [], "none": []}
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert tokens["gaps"] == tokens["apart"] != tokens["none"]


def test_embeddings_of_a_wrong_shape_are_refused_and_can_be_sent_again(engine: LLMEngine) -> None:
    prompt = ProcessedPrompt([1, 3, 3, 50], [PlaceholderRange(1, 2)], ["late"])
    engine.add_request("r", prompt, [None], SamplingParams(max_tokens=4, ignore_eos=True))
    with pytest.raises(InvalidRequestError, match=r"shape \[3, 192\], .* takes \[2, 192\]") as caught:
        engine.set_embeddings("r", 0, torch.zeros(3, 192))
    assert caught.value.item == 0
    engine.set_embeddings("r", 0, torch.zeros(2, 192))
    engine.set_embeddings("unknown", 0, torch.zeros(2, 192))
    assert list(run(engine))[-1].finish_reason == "length"


def test_only_the_language_half_is_loaded(shapes: str) -> None:
    half, _ = load_language_half(EngineConfig(shapes))
    names = {name for name, _ in half.named_parameters()}
    assert not any("vision_tower" in name or "projector" in name for name in names)
    whole = LlavaForConditionalGeneration.from_pretrained(shapes)
    rest = {name for name, _ in whole.named_parameters()} - names
    assert all("vision_tower" in name or "projector" in name for name in rest)


def test_both_spellings_of_the_weights_names_load(shapes: str, tmp_path: Path) -> None:
    """Checkpoints are found with `language_model.model.` (published ones) and with `model.language_model.`."""

    def rename(name: str) -> str:
        name = name.replace("language_model.model.", "model.language_model.")
        return name.replace("language_model.lm_head.", "lm_head.")

    half, _ = load_language_half(EngineConfig(copy_checkpoint(shapes, tmp_path, rename)))
    expected, _ = load_language_half(EngineConfig(shapes))
    for (name, value), (_, other) in zip(half.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(value, other), name


def test_a_checkpoint_without_a_weight_is_refused(shapes: str, tmp_path: Path) -> None:
    copy = copy_checkpoint(shapes, tmp_path, lambda name: None if "layers.2.mlp.up_proj" in name else name)
    with pytest.raises(ValueError, match=r"lacks weights of the language half.*up_proj"):
        LLMEngine(EngineConfig(copy))


@pytest.mark.parametrize("name", ["block_size", "kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens"])
def test_a_setting_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig("model", **{name: 0})  # type: ignore[arg-type]


def test_a_budget_below_one_token_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(8\).*max_num_seqs \(9\)"):
        EngineConfig("model", max_num_batched_tokens=8, max_num_seqs=9)


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"max_model_len": 36}, r"36 tokens, which the context of 36 tokens .* max_model_len is 36"),
        ({"kv_cache_bytes": 2**16}, r"the KV cache holds 32 tokens \(2 blocks\)"),
    ],
)
def test_settings_without_room_for_the_largest_picture_are_refused(
    shapes: str, settings: dict[str, int], numbers: str
) -> None:
    with pytest.raises(ValueError, match=numbers):
        make_engine(shapes, largest_item_tokens=36, **settings)


def test_the_caches_default_size_holds_the_largest_picture(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylens.llm.model_runner._CPU_CACHE_BYTES", 2**16)
    engine = make_engine(shapes, largest_item_tokens=36, max_num_batched_tokens=64, kv_cache_bytes=None)
    assert engine.max_model_len >= 36 + 64


def test_a_cache_of_fewer_bytes_a_number_holds_more_positions(shapes: str) -> None:
    usual, small = (make_engine(shapes, kv_cache_dtype=dtype) for dtype in ("auto", "float8_e4m3fn"))
    assert small._runner.num_blocks == 4 * usual._runner.num_blocks
    (output, *_) = ask(small, PARAMS)
    assert output.token_ids == ask(usual, PARAMS)[0].token_ids
