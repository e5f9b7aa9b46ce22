"""Where positions depend on the items: answers about videos of any length equal those of `generate`, turn by turn."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.modeling.families import SERVED_FAMILIES, load_family
from tests.llm.conversations import PLACEHOLDERS, Conversations, Medium, Turn, marked, random_turn
from tests.llm.greedy_answers import answers
from tests.pictures import encoded
from tests.preprocess.parity import picture
from tests.preprocess.video_parity import encoded_clip
from tests.small_models import Request

FAMILIES = sorted(name for name in SERVED_FAMILIES if getattr(load_family("llm", name), "num_rope_axes", 1) > 1)


@pytest.fixture(scope="module", params=FAMILIES)
def conversations(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    return Conversations(request.param, tmp_path_factory.mktemp("model"))


@dataclass(frozen=True)
class Engines:
    """Two for one checkpoint, the second without a prefix cache."""

    caching: LLMEngine
    plain: LLMEngine

    def check(self, requests: Sequence[Request]) -> None:
        """The answer to each turn is that of `generate`, with what earlier turns left in the cache and without."""
        for request in requests:
            assert answers(self.caching, [request]) == answers(self.plain, [request]) == [request.expected]


@pytest.fixture(scope="module")
def engines(conversations: Conversations) -> Engines:
    config = EngineConfig(conversations.checkpoint, kv_cache_bytes=2**24, block_size=4)
    return Engines(LLMEngine(config), LLMEngine(replace(config, prefix_caching=False)))


def test_families_with_several_axes_are_known() -> None:
    assert FAMILIES == ["qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"]


@pytest.mark.long
@pytest.mark.parametrize("num_cases", [2, pytest.param(67, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_answers_about_random_clips_equal_generate(
    conversations: Conversations, engines: Engines, num_cases: int
) -> None:
    for seed in range(num_cases):
        draw = random.Random(seed)
        engines.check(conversations.requests([random_turn(draw, least=1), random_turn(draw, least=0)]))


@pytest.mark.long
def test_the_next_turn_finds_prompt_and_answer_in_the_cache(conversations: Conversations, engines: Engines) -> None:
    """A minute of film, of which the frames' times reach far beyond the question."""
    clip = Medium("video", encoded_clip(240, 64, 48, 4), {"fps": 0.5})
    first, second = conversations.requests([Turn(marked("video") + "what?", [clip]), Turn("and then?", [])])
    engines.check([first])
    before = engines.caching.stats.num_prefix_hits
    engines.check([second])
    num_known = len(first.prompt.prompt_token_ids) + len(first.expected) - 1
    # A prefix of recurrent states ends at a snapshot.
    unit = 64 if conversations.model_type.startswith("qwen3_5") else 4
    assert engines.caching.stats.num_prefix_hits - before == num_known // unit * unit


def test_answers_right_behind_a_picture_equal_generate(conversations: Conversations, engines: Engines) -> None:
    """The axes then go on from different positions, and the next turn has other ones for the answer."""
    medium = Medium("image", encoded(picture(3)))
    turns = [Turn(f"Look: <|vision_start|>{PLACEHOLDERS['image']}", [medium]), Turn("<|vision_end|> what?", [])]
    engines.check(conversations.requests(turns))
