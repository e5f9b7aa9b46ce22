"""What an engine answers to requests at once, greedily, in at most as many tokens as `generate` was asked for."""

from collections.abc import Sequence
from dataclasses import replace

from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from tests.small_models import NUM_TOKENS, Request

PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def answers(engine: LLMEngine, requests: Sequence[Request], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """The first `num_tokens` of each answer. Raises RuntimeError where the engine has lost a block."""
    params = replace(PARAMS, max_tokens=num_tokens)
    for index, one in enumerate(requests):
        engine.add_request(str(index), one.prompt, one.embeddings, params)
    collected: list[list[int]] = [[] for _ in requests]
    while engine.has_unfinished():
        for output in engine.step():
            collected[int(output.request_id)] += output.token_ids
    engine.check_integrity()
    return collected
