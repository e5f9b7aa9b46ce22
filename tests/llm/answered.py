"""What clients see of an engine's answers, for tests in which two engines answer the same."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from raylens.llm.engine import LLMEngine
from raylens.llm.outputs import RequestOutput
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ProcessedPrompt

PROMPTS = [[1, *(50 + i * (j % (7 + i)) for j in range(20 + 9 * i))] for i in range(5)]
"""Of the bundled model's tokens, each longer than the one before. They repeat themselves, so that guesses are right."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What the client sees of one answer. Log-probabilities are compared as text."""

    token_ids: list[int]
    logprobs: str
    finish_reason: str | None
    ends_in_stop_token: bool
    num_output_tokens: list[int]


def add(engine: LLMEngine, name: str, prompt: list[int], params: SamplingParams) -> None:
    engine.add_request(name, ProcessedPrompt(prompt, [], []), [], params)


def steps(engine: LLMEngine) -> Iterator[RequestOutput]:
    """The outputs of all steps until nothing is unfinished. Then the engine holds nothing."""
    while engine.has_unfinished():
        yield from engine.step()
        engine.check_integrity()
    assert engine._in_flight is None
    assert engine.stats.kv_cache_usage == 0


def answered(outputs: Iterable[RequestOutput]) -> dict[str, Answered]:
    """The answers by the names of their requests, with a point and the number of the answer behind."""
    by_answer: dict[str, list[RequestOutput]] = {}
    for output in outputs:
        by_answer.setdefault(f"{output.request_id}.{output.index}", []).append(output)
    return {
        name: Answered(
            [token_id for output in own for token_id in output.token_ids],
            str([one for output in own for one in (*output.prompt_logprobs, *output.logprobs)]),
            own[-1].finish_reason,
            own[-1].has_stop_token,
            [output.num_output_tokens for output in own],
        )
        for name, own in by_answer.items()
    }


def answer(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> dict[str, Answered]:
    """What the engine answers to the prompts at once. Their names are their indices."""
    for index, prompt in enumerate(prompts):
        add(engine, str(index), prompt, params)
    return answered(steps(engine))
