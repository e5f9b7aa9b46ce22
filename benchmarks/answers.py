"""Greedy answers of the decode engine to random prompts, and their speed compared with another engine's."""

import time
from collections.abc import Callable
from typing import Any

import torch

from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ProcessedPrompt

PROMPT_TOKENS, NEW_TOKENS = 128, 64
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


Prompts = list[list[int]]


def make_prompts(count: int) -> Prompts:
    tokens = torch.randint(10, 200, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    return tokens.tolist()


@torch.inference_mode()
def answer(engine: LLMEngine, prompts: Prompts) -> Prompts:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), ProcessedPrompt(prompt, [], []), [], PARAMS)
    answers: Prompts = [[] for _ in prompts]
    while engine.has_unfinished():
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
    return answers


def timed(action: Callable[[], Prompts]) -> tuple[float, Prompts]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def compare(ours: Callable[[], Prompts], theirs: Callable[[], Prompts], rounds: int) -> dict[str, Any]:
    """Compares tokens per second of both, in turns, by best times, and whether all tokens were equal."""
    our_times, their_times, is_equal = [], [], True
    for _ in range(rounds):
        our_time, our_answers = timed(ours)
        their_time, their_answers = timed(theirs)
        our_times.append(our_time)
        their_times.append(their_time)
        is_equal &= our_answers == their_answers
    num_tokens = sum(map(len, their_answers))
    return {
        "tokens_per_second": round(num_tokens / min(our_times), 1),
        "generate_tokens_per_second": round(num_tokens / min(their_times), 1),
        "ratio": round(min(their_times) / min(our_times), 3),
        "equal": is_equal,
    }
