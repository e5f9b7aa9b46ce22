"""Each setting does to logits what transformers' processor of the same name does, whatever the other rows ask for."""

from collections.abc import Callable

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from raylens.llm.sampling.logits_processors import plan_edits
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler_state import SamplerState, SeenTokens
from raylens.llm.sampling.truncation import NUCLEUS_PREFIX, plan_truncation
from tests.llm.planned_edits import apply

VOCAB = 4 * NUCLEUS_PREFIX
EOS = frozenset({7, 9})


def random_logits(rows: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def state(params: SamplingParams, prompt: list[int], output: list[int]) -> SamplerState:
    made = SamplerState(params, prompt, vocab_size=VOCAB, eos_token_ids=EOS)
    for token_id in output:
        made.append(token_id)
    return made


def random_tokens(count: int, seed: int) -> list[int]:
    # Few distinct ones, so that tokens repeat.
    tokens: list[int] = torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_equals_that_of_transformers(penalty: float) -> None:
    logits = random_logits(3, 3.0)
    prompts, outputs = ([random_tokens(40, seed) for seed in seeds] for seeds in ((0, 1, 2), (3, 4, 5)))
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    expected = reference(torch.tensor([a + b for a, b in zip(prompts, outputs, strict=True)]), logits.clone())
    params = SamplingParams(repetition_penalty=penalty)
    apply(plan_edits, logits, [state(params, a, b) for a, b in zip(prompts, outputs, strict=True)])
    assert torch.equal(logits, expected)


def test_counts_grow_with_the_output() -> None:
    prompt, output = random_tokens(300, 0), random_tokens(500, 1)
    seen = SeenTokens(prompt)
    for token_id in output:
        seen.append(token_id)
    counts = dict(zip(seen.token_ids.tolist(), seen.output_counts.tolist(), strict=True))
    assert counts == {token_id: output.count(token_id) for token_id in {*prompt, *output}}


def test_presence_and_frequency_penalties_are_those_of_openai() -> None:
    """Its published formula: logit -= count * frequency + (count > 0) * presence, over the output alone."""
    logits = random_logits(1, 3.0)
    output = random_tokens(50, 1)
    counts = torch.bincount(torch.tensor(output), minlength=VOCAB)
    expected = logits - counts * 0.7 - (counts > 0) * -1.1
    params = SamplingParams(frequency_penalty=0.7, presence_penalty=-1.1)
    apply(plan_edits, logits, [state(params, random_tokens(50, 2), output)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_output", [0, 3, 4])
def test_min_tokens_equal_those_of_transformers(num_output: int) -> None:
    logits, output = random_logits(1, 3.0), random_tokens(num_output, 1)
    reference = MinNewTokensLengthLogitsProcessor(5, 4, sorted(EOS))
    expected = reference(torch.tensor([[1] * 5 + output]), logits.clone())
    apply(plan_edits, logits, [state(SamplingParams(min_tokens=4), [1] * 5, output)])
    assert torch.equal(logits, expected)
    assert logits.isinf().any() == (num_output < 4)


def test_only_rows_with_a_setting_change_and_only_in_their_tokens() -> None:
    logits = random_logits(5, 3.0)
    before = logits.clone()
    params = [
        SamplingParams(),
        SamplingParams(logit_bias={3: 5.0, 4: -5.0}),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(min_tokens=1),
        SamplingParams(presence_penalty=1.0),
    ]
    apply(plan_edits, logits, [state(one, [5, 5, VOCAB + 3], []) for one in params])
    changed = [set(row.nonzero().flatten().tolist()) for row in logits != before]
    assert changed == [set(), {3, 4}, {5}, set(EOS), set()]
    assert torch.equal(logits[1, 3:5] - before[1, 3:5], torch.tensor([5.0, -5.0]))


def test_the_order_is_that_of_vllm() -> None:
    """Bias before penalties: what the bias makes positive is divided. Repetition before what is subtracted."""
    logits = torch.full((1, VOCAB), -1.0)
    params = SamplingParams(logit_bias={5: 4.0}, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    apply(plan_edits, logits, [state(params, [6], [5, 5])])
    assert logits[0, 5:7].tolist() == [(-1 + 4) / 2 - 2 * 0.25 - 0.5, -2.0]


Reference = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ALL_CUTS = SamplingParams(min_p=0.02, top_k=9, top_p=0.9)
CUTS: list[tuple[SamplingParams, list[Reference]]] = [
    (SamplingParams(min_p=0.05), [MinPLogitsWarper(0.05)]),
    (SamplingParams(min_p=0.9), [MinPLogitsWarper(0.9)]),
    (SamplingParams(top_k=1), [TopKLogitsWarper(1)]),
    (SamplingParams(top_k=50), [TopKLogitsWarper(50)]),
    (SamplingParams(top_k=VOCAB - 1), [TopKLogitsWarper(VOCAB - 1)]),
    (SamplingParams(top_k=VOCAB - 1, top_p=1.0), [TopKLogitsWarper(VOCAB - 1)]),
    (SamplingParams(top_p=0.3), [TopPLogitsWarper(0.3)]),
    (SamplingParams(top_p=0.9), [TopPLogitsWarper(0.9)]),
    (SamplingParams(top_p=0.001), [TopPLogitsWarper(0.001)]),
    (SamplingParams(top_k=30, top_p=0.7), [TopKLogitsWarper(30), TopPLogitsWarper(0.7)]),
    (SamplingParams(min_p=0.1, top_p=0.8), [MinPLogitsWarper(0.1), TopPLogitsWarper(0.8)]),
    (
        SamplingParams(min_p=0.02, top_k=9, top_p=0.9),
        [MinPLogitsWarper(0.02), TopKLogitsWarper(9), TopPLogitsWarper(0.9)],
    ),
    (SamplingParams(), []),
]


@pytest.mark.parametrize("scale", [0.5, 2.0, 8.0])
def test_each_cut_keeps_what_that_of_transformers_keeps(scale: float) -> None:
    """All in one batch, each against its own processors; from flat distributions, whose nucleus is wide, to peaked."""
    logits = random_logits(len(CUTS), scale)
    logits -= logits.amax(dim=-1, keepdim=True)
    kept = logits.clone()
    apply(plan_truncation, kept, [state(params, [1], []) for params, _ in CUTS])
    for row, (params, references) in enumerate(CUTS):
        expected = logits[row : row + 1]
        for reference in references:
            expected = reference(torch.tensor([[1]]), expected)
        assert torch.equal(kept[row], expected[0]), params


def test_tokens_of_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]]).repeat(2, 1)
    states = [SamplerState(params, (), vocab_size=5) for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5))]
    apply(plan_truncation, logits, states)
    assert logits.isfinite().tolist() == [[True, True, True, True, False]] * 2
