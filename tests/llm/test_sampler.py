"""Each row of a mixed batch is sampled by its own parameters."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler import SampledToken
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.llm.sampling.truncation import NUCLEUS_PREFIX
from raylens.preprocess.schema import InvalidRequestError
from tests.llm.sampling import sample

pytestmark = pytest.mark.usefixtures("module_with_kernels_and_without")

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0, 2.5])
VOCAB = len(LOGITS)


def state(params: SamplingParams, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = ()) -> SamplerState:
    made = SamplerState(params, prompt, vocab_size=VOCAB, eos_token_ids=frozenset({1}))
    for token_id in output:
        made.append(token_id)
    return made


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, seed=seed)


def token_ids(sampled: list[SampledToken | None]) -> list[int | None]:
    return [None if token is None else token.token_id for token in sampled]


def one(params: SamplingParams, logits: torch.Tensor = LOGITS) -> int | None:
    return token_ids(sample(logits[None].clone(), [state(params)]))[0]


def kept(probabilities: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[token_ids] = True
    probabilities = probabilities.masked_fill(~mask, 0.0)
    return probabilities / probabilities.sum()


def distributions() -> list[tuple[SamplingParams, tuple[int, ...], torch.Tensor]]:
    """Settings, the output so far, and the exact distribution that follows from both, by hand."""
    plain = LOGITS.double().softmax(-1)
    by_count = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.4)
    penalized = torch.tensor([1.0, 3 - 0.5 - 2 * 0.4, 2 - 0.5 - 0.4, 0.0, -1.0, 2.5]).double()
    repeated = torch.tensor([1 / 1.5, 3 / 1.5, 2.0, 0.0, -1 * 1.5, 2.5]).double()  # the prompt's 1, the output's 0, 4
    biased = torch.tensor([1.0, -2.0, 2.0, 4.0, -1.0, 2.5]).double()
    return [
        (SamplingParams(temperature=1.0), (), plain),
        (SamplingParams(temperature=0.5), (), (LOGITS.double() / 0.5).softmax(-1)),
        (SamplingParams(temperature=2.0), (), (LOGITS.double() / 2).softmax(-1)),
        (SamplingParams(temperature=1.0, top_k=3), (), kept(plain, [1, 5, 2])),
        (SamplingParams(temperature=1.0, top_p=0.8), (), kept(plain, [1, 5, 2])),  # 0.46, 0.74, 0.91
        (SamplingParams(temperature=1.0, top_p=0.7), (), kept(plain, [1, 5])),
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.8), (), kept(plain, [1, 5])),  # 0.51, 0.81 of the three
        (SamplingParams(temperature=1.0, min_p=0.2), (), kept(plain, [1, 5, 2])),  # e**-1 stays, e**-2 goes
        (SamplingParams(temperature=1.0, min_p=0.2, top_p=0.8), (), kept(plain, [1, 5])),  # of what min_p leaves
        (by_count, (1, 2, 1), penalized.softmax(-1)),
        (SamplingParams(temperature=1.0, repetition_penalty=1.5), (0, 4), repeated.softmax(-1)),
        (SamplingParams(temperature=1.0, logit_bias={1: -5, 3: 4}), (), biased.softmax(-1)),
        (SamplingParams(temperature=1.0, logit_bias={1: -5, 3: 4}, top_k=1), (), kept(biased.softmax(-1), [3])),
        (SamplingParams(temperature=1.0, min_tokens=4), (0, 2), kept(plain, [0, 2, 3, 4, 5])),
    ]


NUM_DRAWS = 3000


@pytest.mark.long
def test_drawn_tokens_follow_the_exact_distribution_of_each_row() -> None:
    """All settings in one batch; chi-square at 0.1 % a setting, with fixed seeds."""
    expected = distributions()
    counts = [Counter[int | None]() for _ in expected]
    batch = 500
    for first in range(0, NUM_DRAWS, batch):
        states = [
            state(with_seed(params, seed), output=output)
            for seed in range(first, first + batch)
            for params, output, _ in expected
        ]
        for row, drawn_id in enumerate(token_ids(sample(LOGITS.repeat(len(states), 1), states))):
            counts[row % len(expected)][drawn_id] += 1
    for (params, _, probabilities), drawn in zip(expected, counts, strict=True):
        support = probabilities.nonzero().flatten().tolist()
        assert set(drawn) <= set(support), params
        observed = torch.tensor([drawn[token_id] for token_id in support], dtype=torch.float64)
        ideal = probabilities[support] * NUM_DRAWS
        chi_square = ((observed - ideal) ** 2 / ideal).sum()
        freedom = torch.tensor((len(support) - 1) / 2, dtype=torch.float64)
        assert len(support) == 1 or torch.special.gammaincc(freedom, chi_square / 2) > 0.001, params


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=1e-40),
        SamplingParams(temperature=1.0, top_p=1e-300),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=1e-3, top_p=0.5, top_k=3),
    ],
)
def test_greedy_and_extreme_parameters_take_the_likeliest(params: SamplingParams) -> None:
    assert [one(with_seed(params, seed)) for seed in range(50)] == [1] * 50


def test_what_is_off_changes_nothing() -> None:
    off = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, logit_bias={}
    )
    assert not state(off).edits_logits
    huge = SamplingParams(temperature=1.0, top_k=10**9)
    plain = [one(with_seed(SamplingParams(temperature=1.0), seed)) for seed in range(50)]
    assert [one(with_seed(off, seed)) for seed in range(50)] == plain
    assert [one(with_seed(huge, seed)) for seed in range(50)] == plain


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_breaks_nothing_else(broken: float, temperature: float) -> None:
    logits = LOGITS.repeat(4, 1)
    logits[1, 3] = broken
    logits[2, :] = -torch.inf
    params = SamplingParams(temperature=temperature, top_p=0.4, top_k=2, logprobs=2, repetition_penalty=1.1)
    sampled = sample(logits, [state(params, prompt=(4,)) for _ in range(4)])
    assert token_ids(sampled) == [1, None, None, 1]


def test_a_nan_that_a_ban_would_hide_is_still_found() -> None:
    logits = LOGITS.repeat(2, 1)
    logits[0, 1] = torch.nan
    states = [state(SamplingParams(temperature=0.0, min_tokens=1)) for _ in range(2)]
    assert token_ids(sample(logits, states)) == [None, 5]


@pytest.mark.long
def test_the_nucleus_may_be_wider_than_what_is_looked_at_first() -> None:
    vocab = 3 * NUCLEUS_PREFIX
    logits = torch.linspace(0.0, -0.5, vocab)
    probabilities = logits.double().softmax(-1)
    size = int((probabilities.cumsum(-1) < 0.75).sum()) + 1
    assert NUCLEUS_PREFIX < size < vocab
    peaked = torch.where(torch.arange(vocab) < 5, 10.0, 0.0)
    rows, counts = 4000, torch.zeros(vocab)
    params = SamplingParams(temperature=1.0, top_p=0.75, seed=0)
    states = [SamplerState(with_seed(params, seed), (), vocab_size=vocab) for seed in range(rows + 1)]
    drawn = token_ids(sample(torch.cat([peaked[None], logits.repeat(rows, 1)]), states))
    assert drawn[0] is not None
    assert drawn[0] < 5
    for token_id in drawn[1:]:
        assert token_id is not None
        counts[token_id] += 1
    assert counts[size:].sum() == 0
    assert counts[size - 100 : size].sum() > 0
    assert abs(counts[: size // 2].sum() / rows - probabilities[: size // 2].sum() / probabilities[:size].sum()) < 0.03


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_no_random_number_draws_a_token_that_is_cut(monkeypatch: pytest.MonkeyPatch, uniform: float) -> None:
    """Bounds of groups of tokens included: what is left is one token at the end of a group and one at a start."""
    monkeypatch.setattr(SamplerState, "draw_uniform", lambda _: uniform)
    logits = torch.full((1, 400), -torch.inf)
    logits[0, [127, 256]] = 1.0
    own = SamplerState(SamplingParams(temperature=1.0), (), vocab_size=400)
    assert token_ids(sample(logits, [own])) == [127 if uniform < 0.5 else 256]


SETTINGS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.95, top_k=60),
    SamplingParams(temperature=1.3, top_k=8),
    SamplingParams(temperature=1.0, min_p=0.02, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, frequency_penalty=0.5, logit_bias={3: 2.0}),
]
WIDE = 400
ALL_LOGITS = torch.randn(12, WIDE, generator=torch.Generator().manual_seed(3)) * 3


def seeded(index: int) -> SamplerState:
    return SamplerState(with_seed(SETTINGS[index], 100 + index), (5, 6), vocab_size=WIDE)


def alone(index: int, steps: int) -> list[int | None]:
    own = seeded(index)
    return [token_ids(sample(ALL_LOGITS[step][None].clone(), [own]))[0] for step in range(steps)]


@pytest.mark.long
@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_seeded_rows_give_the_same_tokens_in_any_batch(data: st.DataObject) -> None:
    """Whatever else is in the batch, whichever row is whose, and whenever a sequence pauses."""
    states = [seeded(index) for index in range(len(SETTINGS))]
    tokens: list[list[int | None]] = [[] for _ in SETTINGS]
    for _ in range(10):
        members = data.draw(st.lists(st.sampled_from(range(len(SETTINGS))), unique=True))
        strangers = data.draw(st.lists(st.sampled_from([*SETTINGS, SamplingParams()]), max_size=4))
        rows = data.draw(st.permutations([*members, *(-1 - i for i in range(len(strangers)))]))
        logits = torch.stack([ALL_LOGITS[len(tokens[row]) if row >= 0 else row] for row in rows or [0]])[: len(rows)]
        others = [SamplerState(params, (1,), vocab_size=WIDE) for params in strangers]
        sampled = sample(logits, [states[row] if row >= 0 else others[-1 - row] for row in rows])
        for row, token_id in zip(rows, token_ids(sampled), strict=True):
            if row >= 0:
                tokens[row].append(token_id)
    for index, own in enumerate(tokens):
        assert own == alone(index, len(own))


def test_answers_to_one_seed_differ_from_each_other_and_repeat() -> None:
    params = SamplingParams(temperature=1.0, seed=-7, n=3)

    def stream(params: SamplingParams, index: int) -> list[float]:
        own = SamplerState(params, (), vocab_size=VOCAB, index=index)
        return [own.draw_uniform() for _ in range(3)]

    streams = [stream(params, index) for index in range(3)]
    assert streams == [stream(params, index) for index in range(3)]
    assert len({number for own in streams for number in own}) == 9
    # The second answer to one seed is not the first to the next.
    assert stream(with_seed(params, -6), 0) not in streams
    unseeded = SamplingParams(temperature=1.0)
    assert stream(unseeded, 0) != stream(unseeded, 0)


def test_no_end_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=(5,))
    early, late = state(params), state(params, output=(0,))
    assert token_ids(sample(LOGITS.repeat(2, 1), [early, late])) == [2, 1]
    assert early.stop_token_ids == {1, 5}
    ignoring = state(replace(params, ignore_eos=True))
    assert token_ids(sample(LOGITS[None].clone(), [ignoring])) == [1]
    assert ignoring.stop_token_ids == {5}


def test_min_tokens_gives_way_where_only_an_end_is_left() -> None:
    params = SamplingParams(temperature=1.0, min_tokens=5, stop_token_ids=tuple(range(VOCAB)))
    assert one(replace(params, stop_token_ids=(0, 2, 3, 4, 5))) is not None
    certain = torch.where(torch.arange(VOCAB) == 1, 0.0, -torch.inf)
    assert one(SamplingParams(temperature=1.0, min_tokens=5), certain) == 1


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={0: 1.0, -1: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=(0, VOCAB)), "stop_token_ids"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids"),
    ],
)
def test_tokens_outside_the_vocabulary_name_the_field(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"between 0 and {VOCAB - 1}, got (-1|{VOCAB})") as caught:
        state(params)
    assert caught.value.field == field


def test_an_empty_batch_gives_nothing() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
