"""Greedy answers to random prompts, of the decode engine and of Hugging Face `generate`."""

from typing import Any

import torch
from transformers import PreTrainedModel

from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ProcessedPrompt

Prompts = list[list[int]]


def make_prompts(count: int, num_tokens: int) -> Prompts:
    tokens = torch.randint(10, 200, (count, num_tokens), generator=torch.Generator().manual_seed(1))
    return tokens.tolist()


def add_requests(engine: LLMEngine, prompts: Prompts, num_new: int) -> None:
    """Adds greedy requests of exactly `num_new` tokens, named 0, 1 and so on."""
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), ProcessedPrompt(prompt, [], []), [], params)


def run_to_end(engine: LLMEngine) -> None:
    while engine.has_unfinished():
        engine.step()


@torch.inference_mode()
def answer(engine: LLMEngine, prompts: Prompts, num_new: int) -> Prompts:
    add_requests(engine, prompts, num_new)
    answers: Prompts = [[] for _ in prompts]
    while engine.has_unfinished():
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
    return answers


@torch.inference_mode()
def generate(model: PreTrainedModel, prompts: Prompts, num_new: int, **settings: Any) -> Prompts:
    """Returns transformers' answers to prompts of equal length. `settings`: further arguments of `generate`."""
    token_ids = torch.tensor(prompts, device=model.device)
    output = model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=num_new,
        min_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    return output[:, token_ids.shape[1] :].tolist()  # type: ignore[no-any-return]
