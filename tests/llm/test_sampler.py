"""Each row of a mixed batch is sampled by its own parameters."""

from dataclasses import replace

import pytest
import torch

from llm.sampler import sample
from llm.sampling_params import SamplingParams
from llm.sequence import Sequence
from preprocess.schema import InvalidRequestError

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0])
NO_EOS: frozenset[int] = frozenset()


def sequence(params: SamplingParams, seed: int = 0) -> Sequence:
    made = Sequence("s", [1], 1, [], params, 100)
    made.generator = torch.Generator().manual_seed(seed)
    return made


def draw(params: SamplingParams, count: int = 2000) -> torch.Tensor:
    """Relative frequencies of the four tokens."""
    drawn = sample(LOGITS.repeat(count, 1), [sequence(params, seed) for seed in range(count)], NO_EOS)
    return torch.bincount(torch.tensor(drawn), minlength=4) / count


def test_temperature_zero_is_greedy() -> None:
    assert sample(LOGITS[None], [sequence(SamplingParams(temperature=0.0))], NO_EOS) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    frequencies = draw(SamplingParams(temperature=temperature))
    chi_square = (2000 * (frequencies - expected) ** 2 / expected).sum()
    assert chi_square < 16.3  # 0.1 % of a chi-square with 3 degrees of freedom


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=1.0, top_k=2), {1, 2}),
        (SamplingParams(temperature=1.0, top_k=1), {1}),
        (SamplingParams(temperature=1.0, top_p=0.6), {1}),
        (SamplingParams(temperature=1.0, top_p=0.8), {1, 2}),
        (SamplingParams(temperature=2.0, top_p=1.0, top_k=0), {0, 1, 2, 3}),
    ],
)
def test_top_k_and_top_p_cut_the_tail(params: SamplingParams, allowed: set[int]) -> None:
    assert set(draw(params).nonzero().flatten().tolist()) == allowed


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-40),
        SamplingParams(temperature=1.0, top_p=1e-300),
        SamplingParams(temperature=1e-3, top_p=0.5, top_k=3),
    ],
)
def test_extreme_parameters_take_the_likeliest(params: SamplingParams) -> None:
    assert draw(params, 50).tolist() == [0, 1, 0, 0]


def test_a_broken_row_breaks_nothing_else() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1] = torch.nan
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=0.0)]
    assert sample(logits, [sequence(one) for one in params], NO_EOS) == [1, None, 1]


def test_a_seed_decides_whatever_else_is_in_the_batch() -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    alone = sample(LOGITS[None].clone(), [sequence(params, 7)], NO_EOS)
    others = [sequence(SamplingParams(temperature=1.0), seed) for seed in range(5)]
    mixed = sample(LOGITS.repeat(6, 1), [*others, sequence(params, 7)], NO_EOS)
    assert mixed[-1] == alone[0]


def test_no_end_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1)
    early, late = sequence(params), sequence(params)
    late.append_token(5)
    assert sample(LOGITS.repeat(2, 1), [early, late], frozenset({1})) == [2, 1]
    ignoring = sequence(replace(params, ignore_eos=True))
    assert sample(LOGITS[None].clone(), [ignoring], frozenset({1})) == [1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", ("x",) * 17),
    ],
)
def test_bad_parameters_name_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
