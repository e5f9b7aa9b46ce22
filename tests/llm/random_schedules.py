"""Requests to an engine at random times, so that work of many kinds meets in a step."""

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from types import MappingProxyType
from typing import Any, Protocol

import pytest
import torch

from raylens.llm.engine import LLMEngine
from raylens.llm.prompt_lookup import PromptLookup
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler import choose
from raylens.preprocess.schema import ProcessedPrompt


class Asked(Protocol):
    """A prompt with its items' embeddings, and the greedy tokens of `generate`."""

    @property
    def prompt(self) -> ProcessedPrompt: ...
    @property
    def embeddings(self) -> list[torch.Tensor]: ...
    @property
    def expected(self) -> list[int]: ...


class Prophet(PromptLookup):
    """Guesses the answers of `wholes` (each a prompt and its answer), with some wrong tokens."""

    wholes: list[list[int]]
    random = random.Random(0)

    def guess(self, max_tokens: int) -> list[int]:
        start = len(self._token_ids)
        whole = next((one for one in self.wholes if one[:start] == self._token_ids), [])
        coming = whole[start : start + min(max_tokens, self.random.randint(0, 7))]
        return [token if self.random.random() < 0.8 else 200 + token % 7 for token in coming]


def foresee(monkeypatch: pytest.MonkeyPatch, requests: Seq[Asked], prompts: Seq[list[int]] = ()) -> None:
    """Lets engines guess the answers of `requests`. `prompts`: of the decoder, if these are others than the requests'
    own."""
    monkeypatch.setattr("raylens.llm.engine.PromptLookup", Prophet)
    prompts = prompts or [one.prompt.prompt_token_ids for one in requests]
    Prophet.wholes = [[*prompt, *one.expected] for prompt, one in zip(prompts, requests, strict=True)]


class Schedule:
    """Asks some of the requests at random times, some with late embeddings, and aborts some. Some steps fail."""

    def __init__(
        self, engine: LLMEngine, requests: Seq[Asked], seed: int, bias: Mapping[int, float] = MappingProxyType({})
    ) -> None:
        self.engine, self.requests, self.bias = engine, requests, dict(bias)
        self.random = random.Random(seed)
        self.late: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self.asked: dict[str, tuple[Asked, int]] = {}
        self.found: dict[str, list[int]] = {}

    def run(self) -> None:
        waiting = [self.random.choice(self.requests) for _ in range(self.random.randint(2, 7))]
        while waiting or self.engine.has_unfinished():
            if waiting and self.random.random() < 0.3:
                self.ask(waiting.pop())
            if self.late and self.random.random() < 0.3:
                name = self.random.choice(sorted(self.late))
                self.engine.set_embeddings(name, *self.late[name].pop())
                self.late = {name: left for name, left in self.late.items() if left}
            if self.asked and self.random.random() < 0.02:
                name = self.random.choice(sorted(self.asked))
                self.engine.abort(name)
                self.asked.pop(name)
                self.late.pop(name, None)
            for output in self.engine.step():
                self.found[output.request_id] += output.token_ids
                if output.finish_reason == "error":
                    self.asked.pop(output.request_id)
                    self.late.pop(output.request_id, None)
        for name, (one, num_tokens) in self.asked.items():
            assert self.found[name] == one.expected[:num_tokens], name

    def ask(self, one: Asked) -> None:
        name, num_tokens = str(len(self.found)), self.random.randint(1, len(one.expected))
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logit_bias=self.bias)
        late = [(index, own) for index, own in enumerate(one.embeddings) if self.random.random() < 0.3]
        given: list[torch.Tensor | None] = list(one.embeddings)
        for index, _ in late:
            given[index] = None
        self.engine.add_request(name, one.prompt, given, params)
        if late:
            self.late[name] = late
        self.asked[name], self.found[name] = (one, num_tokens), []


class Failing:
    """Calls a function, which fails now and then."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.random, self.num_failures = function, random.Random(0), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.random.random() < 0.003:
            self.num_failures += 1
            raise RuntimeError("this step fails")
        return self.function(*args, **kwargs)


def check_schedules(
    engine: LLMEngine,
    requests: Seq[Asked],
    num_schedules: int,
    monkeypatch: pytest.MonkeyPatch,
    bias: Mapping[int, float] = MappingProxyType({}),
) -> None:
    """Runs schedules in which some steps and some choices fail. All that the schedules are for has to happen."""
    steps, choices = Failing(engine._runner.run), Failing(choose)
    monkeypatch.setattr(engine._runner, "run", steps)
    monkeypatch.setattr("raylens.llm.step_in_flight.choose", choices)
    for seed in range(num_schedules):
        Schedule(engine, requests, seed, bias).run()
        engine.check_integrity()
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_prefix_hits > 0
    assert steps.num_failures > 0 < choices.num_failures
