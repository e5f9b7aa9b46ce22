"""Requests through the engine in every way in which it may run a prompt: greedy tokens equal those of the model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from raylens.deployments.stages.found_model_questions import answers_of, questions_of, suppressed_tokens
from raylens.encoder.config import EncoderConfig
from raylens.encoder.engine import EncoderEngine
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.model_runner import ModelRunner
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.found_model import find_model
from raylens.modeling.model_configs import load_model_config
from raylens.preprocess.schema import ItemInfo, ItemTensors, ProcessedPrompt

WAYS = ("alone", "together", "in chunks", "preempted", "cached prefix", "late embeddings")
NUM_TOKENS = 24
_BLOCK_SIZE = 4


@dataclass(frozen=True)
class Case:
    """A prompt with its embeddings and the model's greedy tokens. `bias`: of tokens that no answer may have."""

    prompt: ProcessedPrompt
    embeddings: list[torch.Tensor]
    expected: list[int]
    bias: dict[int, float] = field(default_factory=dict)


def found_cases(checkpoint: str) -> list[Case]:
    """Questions with pictures, sounds and neither, through Preprocess and Encode."""
    questions = questions_of(checkpoint)
    suppressed = suppressed_tokens(checkpoint)
    answers = answers_of(find_model(load_model_config(checkpoint)), checkpoint, questions, suppressed, NUM_TOKENS)
    encoder = EncoderEngine(EncoderConfig(checkpoint))
    bias = dict.fromkeys(suppressed, -100.0)
    return [
        Case(question.prompt, _encoded(encoder, question.items), answer.token_ids, bias)
        for question, answer in zip(questions, answers, strict=True)
    ]


def _encoded(encoder: EncoderEngine, items: Sequence[tuple[ItemInfo, ItemTensors]]) -> list[torch.Tensor]:
    for index, (info, tensors) in enumerate(items):
        encoder.add_request(str(index), info.modality, tensors)
    found: dict[str, torch.Tensor] = {}
    while encoder.has_unfinished():
        for output in encoder.step():
            assert output.error is None, output.error
            assert output.embeddings is not None
            found[output.request_id] = output.embeddings
    return [found[str(index)] for index in range(len(items))]


def ways_that_differ(checkpoint: str, cases: Sequence[Case]) -> list[str]:
    """Returns those of the WAYS in which some tokens are not the model's."""
    return [way for way, is_equal in _ways(checkpoint, cases) if not is_equal]


def _ways(checkpoint: str, cases: Sequence[Case]) -> Iterator[tuple[str, bool]]:
    roomy = _engine(checkpoint)
    yield "alone", all(_equal(roomy, [case]) for case in cases)
    yield "together", _equal(roomy, cases)
    yield "late embeddings", _equal(roomy, cases, is_late=True)
    cached = _engine(checkpoint, prefix_caching=True)
    yield "cached prefix", all(_equal(cached, [case]) for case in (*cases, *cases))
    largest = max(placeholder.length for case in cases for placeholder in case.prompt.placeholders)
    chunks = {"max_num_batched_tokens": 96, "largest_item_tokens": largest, "max_num_seqs": 8}
    yield "in chunks", _equal(_engine(checkpoint, **chunks), cases)
    # Two prompts have room, their answers have not, but one of these has.
    two = cases[:2]
    split = [roomy._runner.split_prompt(case.prompt) for case in two]
    lengths = [len(prompt.prompt_token_ids) for prompt, _ in split]
    longest = max(length + len(case.expected) for length, case in zip(lengths, two, strict=True))
    num_blocks = max(sum(map(_num_blocks, lengths)) + 2, _num_blocks(longest) + 1)
    num_cross_blocks = sum(_num_blocks(source.num_states) for _, source in split if source is not None)
    # Not by bytes: the kernels of some CPUs pad the blocks.
    with patch.object(ModelRunner, "_count_blocks", lambda runner: (num_blocks, num_cross_blocks)):
        tight = _engine(checkpoint)
    yield "preempted", _equal(tight, two) and tight.stats.num_preemptions > 0


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_SIZE)


def _engine(checkpoint: str, **settings: Any) -> LLMEngine:
    defaults = {"prefix_caching": False, "kv_cache_bytes": 2**27, "block_size": _BLOCK_SIZE}
    return LLMEngine(EngineConfig(checkpoint, **(defaults | settings)))


def _equal(engine: LLMEngine, cases: Sequence[Case], *, is_late: bool = False) -> bool:
    for index, case in enumerate(cases):
        params = SamplingParams(max_tokens=len(case.expected), temperature=0.0, ignore_eos=True, logit_bias=case.bias)
        given: list[torch.Tensor | None] = [None] * len(case.embeddings) if is_late else list(case.embeddings)
        engine.add_request(str(index), case.prompt, given, params)
    found: list[list[int]] = [[] for _ in cases]
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            found[int(output.request_id)] += output.token_ids
        for index, case in enumerate(cases if is_late else ()):
            for number, embeddings in enumerate(case.embeddings):
                engine.set_embeddings(str(index), number, embeddings)
    return found == [case.expected for case in cases]
