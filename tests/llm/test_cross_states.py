"""Cross attention: greedy tokens equal those of `generate` in any schedule, and errors name what does not fit."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.models.mllama import _views
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sequence import Sequence as OneAnswer
from raylens.llm.states.cross_source import CrossBlocks, CrossSource, CrossView
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import InvalidRequestError, ProcessedPrompt, TextPrompt
from tests.llm.greedy_answers import answers
from tests.llm.random_schedules import check_schedules, foresee
from tests.pictures import encoded
from tests.preprocess.parity import picture
from tests.small_models import Request, make_checkpoint, picture_request, whole_class

# Between texts, pictures by number. An empty text between two makes them adjacent: tokens after both see both.
MLLAMA = [
    (["Look: ", " what?"], [0]),
    (["Look: ", " what?"], [1]),
    (["", "", " and ", " now?"], [0, 1, 2]),
    (["a", "b", "", "c"], [2, 0, 3]),
    (["Hello, no picture at all"], []),
]
FLORENCE2 = [(["", "What?"], [0]), (["", "What?"], [1]), (["", "Who is in it, and where are they?"], [0]), (["Hi"], [])]


def requests_of(model_type: str, folder: Path) -> list[Request]:
    make_checkpoint(model_type, folder)
    model = whole_class(model_type).from_pretrained(folder, dtype=torch.float32).eval()
    asked = MLLAMA if model_type == "mllama" else FLORENCE2
    requests = [picture_request(model_type, model, texts, pictures) for texts, pictures in asked]
    assert len({tuple(one.expected) for one in requests}) == len(requests), "answers must depend on the input"
    return requests


@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("model_type", ["florence2", "mllama"])
def test_any_schedule_gives_the_tokens_of_generate(
    model_type: str, is_ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sequences are preempted, some begin with a cached prefix, some guesses are wrong."""
    requests = requests_of(model_type, tmp_path)
    # The number of preemptions depends neither on the rows that kernels pad nor on the machine's speed.
    num_blocks = (5, 24) if model_type == "florence2" else (14, 40)
    monkeypatch.setattr("raylens.llm.model_runner.ModelRunner._count_blocks", lambda runner: num_blocks)
    config = EngineConfig(
        str(tmp_path),
        block_size=4,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        max_decode_slowdown=None,
        async_scheduling=is_ahead,
        prompt_lookup=True,
    )
    engine = LLMEngine(config)
    split = [engine._runner.split_prompt(one.prompt)[0] for one in requests]
    foresee(monkeypatch, requests, [own.prompt_token_ids for own in split])
    check_schedules(engine, requests, 25, monkeypatch)


def test_equal_texts_with_other_pictures_share_no_prefix(tmp_path: Path) -> None:
    first, second = requests_of("mllama", tmp_path)[:2]
    engine = LLMEngine(EngineConfig(str(tmp_path), block_size=4, kv_cache_bytes=2**20))
    found = []
    for name, one in (("first", first), ("second", second), ("again", first)):
        engine.add_request(name, one.prompt, one.embeddings, SamplingParams(max_tokens=1, temperature=0.0))
        found += [output.num_cached_tokens for output in engine.step()]
    assert found[:2] == [0, 0]
    assert found[2] > 0


def test_a_prompt_whose_states_never_fit_is_refused(tmp_path: Path) -> None:
    one = requests_of("mllama", tmp_path)[2]
    engine = LLMEngine(EngineConfig(str(tmp_path), block_size=4, kv_cache_bytes=24 * 2**10))
    most = engine._runner.num_cross_blocks * 4
    with pytest.raises(
        InvalidRequestError, match=f"attends to 60 tokens of pictures and text, the cache holds {most} of them"
    ):
        engine.add_request("r", one.prompt, one.embeddings, SamplingParams(max_tokens=1))
    assert not engine.has_unfinished()


def test_pictures_take_no_positions_of_the_decoder(tmp_path: Path) -> None:
    """Three pictures have 60 states."""
    one = requests_of("mllama", tmp_path)[2]
    config = EngineConfig(str(tmp_path), kv_cache_bytes=2**20, max_model_len=48, largest_item_tokens=60)
    assert answers(LLMEngine(config), [one]) == [one.expected]
    processor = MultiModalProcessor(ProcessorConfig(str(tmp_path), max_model_len=48))
    items = [processor.items.process("image", encoded(picture(index)))[0] for index in (0, 1, 2)]
    prompt = processor.prompts.render(TextPrompt("<s><|image|><|image|> and <|image|> now?"), items, ["a", "b", "c"])
    assert prompt.prompt_token_ids == one.prompt.prompt_token_ids
    with pytest.raises(InvalidRequestError, match="the context of 48 tokens leaves no room"):
        processor.prompts.render(TextPrompt("<|image|>" + "a" * 60), items[:1], ["a"])


def test_a_cache_too_small_for_a_picture_is_refused(tmp_path: Path) -> None:
    make_checkpoint("mllama", tmp_path)
    with pytest.raises(
        ValueError, match="kv_cache_bytes: the cache holds cross states of 48 tokens, .* picture has 60"
    ):
        LLMEngine(EngineConfig(str(tmp_path), block_size=4, kv_cache_bytes=24 * 2**10, largest_item_tokens=60))


def test_the_prompt_of_a_text_encoder_is_not_scored(tmp_path: Path) -> None:
    one = requests_of("florence2", tmp_path)[0]
    engine = LLMEngine(EngineConfig(str(tmp_path), kv_cache_bytes=2**20))
    with pytest.raises(InvalidRequestError, match="prompt_logprobs: the tokens that this model cross-attends to"):
        engine.add_request("r", one.prompt, one.embeddings, SamplingParams(max_tokens=1, prompt_logprobs=0))


def test_a_prompt_beyond_the_text_encoder_is_refused(tmp_path: Path) -> None:
    make_checkpoint("florence2", tmp_path, {"max_position_embeddings": 8})
    engine = LLMEngine(EngineConfig(str(tmp_path), kv_cache_bytes=2**20))
    model = whole_class("florence2").from_pretrained(tmp_path).eval()
    with torch.inference_mode(), pytest.raises(IndexError):
        model.generate(torch.tensor([[5] * 9]), max_new_tokens=1)
    with pytest.raises(InvalidRequestError, match="the prompt has 9 tokens, the model's text encoder takes 8"):
        engine.add_request("r", ProcessedPrompt([5] * 9, [], []), [], SamplingParams(max_tokens=1))


def test_no_answer_continues_the_text_of_the_encoder(tmp_path: Path) -> None:
    """Its prompt ends within a character, which the first byte of the answer would complete."""
    make_checkpoint("florence2", tmp_path)
    engine = LLMEngine(EngineConfig(str(tmp_path), kv_cache_bytes=2**20))
    begin, end = (engine.byte_tokenizer._tokenizer.convert_tokens_to_ids(byte) for byte in "Â¡")
    prompt = ProcessedPrompt([0, begin], [], [], is_continued=True)
    detokenizer = engine.make_detokenizer(SamplingParams(), prompt)
    assert detokenizer.append([end]) + detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ([], [(0, 0, 30, False)]),
        ([3], [(0, 0, 30, False), (3, 0, 10, True)]),
        ([3, 4, 7], [(0, 0, 30, False), (3, 0, 10, True), (4, 0, 20, True), (7, 20, 30, True)]),
        ([0, 5, 6], [(0, 0, 30, False), (0, 0, 10, True), (5, 10, 20, True), (6, 10, 30, True)]),
    ],
)
def test_tokens_see_the_last_adjacent_pictures(at: Sequence[int], expected: list[tuple[int, int, int, bool]]) -> None:
    assert _views(at, [0, 10, 20, 30], 30) == expected


def test_views_of_a_chunk_follow_its_positions() -> None:
    none, first, both = CrossView(0, 0, 9, False), CrossView(2, 0, 5, True), CrossView(6, 0, 9, True)
    source = CrossSource(9, (), 9, [], [none, first, both])
    assert source.views_between(0, 9) == [(2, none), (4, first), (3, both)]
    assert source.views_between(3, 5) == [(2, first)]
    assert source.views_between(40, 41) == [(1, both)]


def sequence(num_states: int) -> OneAnswer:
    source = CrossSource(num_states, (), num_states, [], [CrossView(0, 0, num_states, True)])
    return OneAnswer("r", [1], 1, [], 9, cross_source=source)


def test_blocks_of_states_belong_to_one_sequence() -> None:
    blocks = CrossBlocks(4, block_size=4)
    first, second, large = sequence(9), sequence(4), sequence(17)
    blocks.take(first)
    assert first.cross_table == [0, 1, 2]
    assert blocks.have_room(second)
    assert not blocks.have_room(sequence(5))
    assert blocks.have_room(sequence(5), without=[first])
    assert not blocks.have_room(large, without=[first])
    blocks.take(second)
    assert blocks.usage == 1
    blocks.check_integrity([first, second])
    with pytest.raises(RuntimeError, match="blocks of cross states lost or doubled"):
        blocks.check_integrity([first])
    blocks.give_back(first)
    blocks.give_back(second)
    assert blocks.usage == 0
