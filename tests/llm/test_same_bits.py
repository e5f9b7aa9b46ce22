"""A request has the same log-probabilities, to the last bit, and the same tokens alone and in any company.

The company decides how a prompt is cut into chunks, what a step computes beside it, whether it is preempted and
computed again, and whether its beginning is cached.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.outputs import RequestOutput
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ProcessedPrompt
from tests.llm.answered import Answered, answered
from tests.llm.language_variants import VARIANTS
from tests.small_models import small_requests, whole_class

KV_CACHE_BYTES = 2**22
NUM_TOKENS = 12
KINDS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=4),
    "seeded": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=5, ignore_eos=True, logprobs=4),
    "scored": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=4, prompt_logprobs=2),
}
TEXTS = [[7, *(20 + 3 * (i % 9) for i in range(length))] for length in (1, 16, 37, 75)]
"""They repeat themselves, so that guesses are right."""
ENGINES: dict[str, dict[str, Any]] = {
    "whole prompts": {"max_num_batched_tokens": 2048},
    "chunks": {"max_num_batched_tokens": 16},
    "chunks, no guesses, launched ahead": {
        "max_num_batched_tokens": 16,
        "prompt_lookup": False,
        "async_scheduling": True,
    },
    "few blocks": {"max_num_batched_tokens": 48},
}


@dataclass(frozen=True)
class Join:
    """A request of some kind that comes before a step."""

    at: int
    request: int
    kind: str


JOINS = st.lists(
    st.builds(Join, at=st.integers(0, 12), request=st.integers(0, 9), kind=st.sampled_from(sorted(KINDS))),
    min_size=2,
    max_size=8,
)


@dataclass
class Model:
    """A checkpoint, its requests (a prompt and its items' embeddings each), and an engine of each kind."""

    checkpoint: str
    requests: list[tuple[ProcessedPrompt, list[torch.Tensor]]]
    engines: dict[str, LLMEngine] = field(default_factory=dict)
    alone: dict[tuple[int, str], Answered] = field(default_factory=dict)

    def engine(self, **own: Any) -> LLMEngine:
        config = {"kv_cache_bytes": KV_CACHE_BYTES, "block_size": 4, "max_num_seqs": 7, **own}
        return LLMEngine(EngineConfig(self.checkpoint, **config))

    @cached_property
    def longest_span(self) -> int:
        runner = self.kept_engine("whole prompts")._runner
        layouts = [runner.prompt_layout(prompt) for prompt, _ in self.requests]
        return max((span.end - span.start for layout in layouts for span in layout.spans), default=1)

    @cached_property
    def bytes_for_the_longest(self) -> int:
        longest = max(len(prompt.prompt_token_ids) for prompt, _ in self.requests) + NUM_TOKENS
        return -(-longest // 4) * (KV_CACHE_BYTES // self.kept_engine("whole prompts")._runner.num_blocks)

    def kept_engine(self, name: str) -> LLMEngine:
        if name not in self.engines:
            own = dict(ENGINES[name])
            if name != "whole prompts":
                own["largest_item_tokens"] = max(0, self.longest_span - own["max_num_batched_tokens"])
            if name == "few blocks":
                own["kv_cache_bytes"] = self.bytes_for_the_longest
            self.engines[name] = self.engine(**own)
        return self.engines[name]

    def answered_alone(self, join: Join) -> Answered:
        """By an engine that computes whole prompts, guesses nothing and takes nothing from its cache."""
        key = (join.request % len(self.requests), join.kind)
        if key not in self.alone:
            if "alone" not in self.engines:
                own = {"max_num_batched_tokens": 2048, "prompt_lookup": False, "prefix_caching": False}
                self.engines["alone"] = self.engine(**own)
            (self.alone[key],) = self.answered_together(self.engines["alone"], [join])
        return self.alone[key]

    def answered_together(self, engine: LLMEngine, joins: list[Join]) -> list[Answered]:
        answers = answered(self._outputs(engine, joins))
        return [answers[f"{index}.0"] for index in range(len(joins))]

    def _outputs(self, engine: LLMEngine, joins: list[Join]) -> Iterator[RequestOutput]:
        coming = sorted(enumerate(joins), key=lambda numbered: -numbered[1].at)
        step = 0
        while coming or engine.has_unfinished():
            while coming and coming[-1][1].at <= step:
                index, join = coming.pop()
                prompt, embeddings = self.requests[join.request % len(self.requests)]
                engine.add_request(str(index), prompt, embeddings, KINDS[join.kind])
            yield from engine.step()
            step += 1
        engine.check_integrity()


IN_EVERY_RUN = ("gemma3", "gemma3, narrow windows", "llava", "qwen3_vl")
EXCEPTIONS = ("aria", "gemma3n", "qwen3_vl_moe")
"""Their layers have products of torch, whose last bits depend on the number of rows. `docs/decoding.md` names them."""


@pytest.fixture(
    scope="module",
    params=[
        name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow)
        for name in VARIANTS
        if name not in EXCEPTIONS
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(request.param, tmp_path_factory.mktemp("model"))


def make_model(name: str, folder: Path) -> Model:
    variant = VARIANTS[name]
    checkpoint = variant.checkpoint(folder)
    whole = whole_class(variant.model_type).from_pretrained(checkpoint, dtype=torch.float32).eval()
    requests = [(one.prompt, one.embeddings) for one in small_requests(variant.model_type, whole)]
    return Model(checkpoint, requests + [(ProcessedPrompt(text, [], []), []) for text in TEXTS])


def check(model: Model, joins: list[Join], name: str) -> None:
    together = model.answered_together(model.kept_engine(name), joins)
    assert together == [model.answered_alone(join) for join in joins]


@pytest.mark.parametrize("name", ENGINES)
def test_bits_do_not_depend_on_the_company(model: Model, name: str) -> None:
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(JOINS)
    def check_any(joins: list[Join]) -> None:
        check(model, joins, name)

    check_any()
