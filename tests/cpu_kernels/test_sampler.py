"""Tokens are chosen by any settings as by their definitions in float64, whatever the vocabulary's size."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.sampler import RowSettings, choose_tokens
from raylens.cpu_kernels.structures import address_of

EVERY_LIBRARY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
VOCABULARIES = st.integers(1, 40) | st.sampled_from([127, 128, 129, 255, 257, 1000, 5000])


def row(**numbers: float | None) -> RowSettings:
    return RowSettings(**{"top_p": 1.0, "repetition_penalty": 1.0} | numbers)


@EVERY_LIBRARY
@given(vocab=VOCABULARIES, seed=st.integers(0, 2**32), num_levels=st.integers(1, 1000))
def test_the_first_of_the_highest_logits_is_taken(
    library: KernelLibrary, vocab: int, seed: int, num_levels: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-num_levels, num_levels, (3, vocab), generator=generator).float()
    logits[1] = torch.where(torch.arange(vocab) == seed % vocab, logits[1], -torch.inf)
    expected = np.argmax(logits.numpy(), axis=-1).tolist()
    assert choose_tokens(library, logits.clone(), [None] * 3) == expected


@EVERY_LIBRARY
@given(vocab=VOCABULARIES, place=st.integers(0, 5000), broken=st.sampled_from([math.nan, math.inf, None]))
def test_a_row_without_a_finite_highest_logit_has_no_token(
    library: KernelLibrary, vocab: int, place: int, broken: float | None
) -> None:
    logits = torch.full((3, vocab), -torch.inf)
    logits[[0, 2], vocab // 2] = 1.0
    if broken is not None:
        logits[1] = 0.0
        logits[1, place % vocab] = broken
    assert choose_tokens(library, logits, [None, row(draws=1, temperature=1.0), None]) == [vocab // 2, -1, vocab // 2]


@dataclass(frozen=True)
class Cuts:
    """What limits the tokens that may be drawn."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Whether each token may be drawn, by the definition."""
        probabilities = (logits.double() / self.temperature).softmax(-1)
        is_kept = probabilities >= self.min_p * probabilities.max() * (1 - 1e-6)
        ordered = torch.where(is_kept, probabilities, 0.0).sort(descending=True).values
        if 0 < self.top_k < len(logits):
            ordered = ordered[: self.top_k]
            is_kept &= probabilities >= ordered[-1] * (1 - 1e-6)
        if self.top_p < 1:
            last = int((ordered.cumsum(-1) < self.top_p * ordered.sum()).sum())
            is_kept &= probabilities >= ordered[min(last, len(ordered) - 1)] * (1 - 1e-6)
        return is_kept

    def drawn(self, logits: torch.Tensor, uniform: float) -> list[int]:
        """The token at which the cumulative sum passes `uniform`, and its neighbours where rounding decides."""
        weights = torch.where(self.kept(logits), (logits.double() / self.temperature).softmax(-1), 0.0)
        shares = weights / weights.sum()
        ends = shares.cumsum(-1)
        is_near = (ends - shares <= uniform + 1e-5) & (ends >= uniform - 1e-5)
        return (is_near & (shares > 0)).nonzero().flatten().tolist()


cuts = st.builds(
    Cuts,
    temperature=st.floats(0.1, 5),
    min_p=st.just(0.0) | st.floats(0.01, 1),
    top_k=st.just(0) | st.integers(1, 60) | st.integers(100, 10_000),
    top_p=st.just(1.0) | st.floats(0.01, 0.99),
)


@EVERY_LIBRARY
@given(
    vocab=VOCABULARIES,
    cuts=cuts,
    spread=st.floats(0.1, 10),
    seed=st.integers(0, 2**32),
    uniform=st.floats(0, 1 - 2**-53),
)
def test_tokens_are_drawn_as_defined(
    library: KernelLibrary, vocab: int, cuts: Cuts, spread: float, seed: int, uniform: float
) -> None:
    """Of logits in steps of an eighth, so that some are equal and the others clearly differ."""
    logits = (spread * torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 8).round() / 8
    numbers = {"temperature": cuts.temperature, "min_p": cuts.min_p, "top_k": cuts.top_k, "top_p": cuts.top_p}
    own = row(**numbers, uniform=uniform, draws=1)
    (token,) = choose_tokens(library, logits[None].clone(), [own])
    # Where a sum of weights is almost exactly top_p of all, rounding decides whether one token more is kept.
    near = (
        [replace(cuts, top_p=min(1.0, cuts.top_p * (1 + by))) for by in (-1e-5, 0, 1e-5)] if cuts.top_p < 1 else [cuts]
    )
    assert any(token in one.drawn(logits, uniform) for one in near)


@EVERY_LIBRARY
@given(
    vocab=st.integers(1, 200), seed=st.integers(0, 2**32), penalties=st.tuples(*[st.floats(0.5, 2)] * 3), data=st.data()
)
def test_edits_apply_as_defined(
    library: KernelLibrary, vocab: int, seed: int, penalties: tuple[float, float, float], data: st.DataObject
) -> None:
    tokens = st.lists(st.integers(0, vocab - 1), unique=True).map(lambda ids: np.array(ids, dtype=np.int64))
    masked, bad, early, biased, seen = (data.draw(tokens) for _ in range(5))
    allowed = data.draw(st.none() | tokens)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator)
    biases = torch.randn(len(biased), generator=generator).numpy()
    counts = torch.randint(0, 3, (len(seen),), generator=generator).float().numpy()
    bits = np.ones(-(-vocab // 32) * 32, dtype=bool)
    bits[masked] = False
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    repetition, frequency, presence = penalties
    own = row(
        edits=1,
        mask=address_of(mask),
        biases=address_of(biases),
        output_counts=address_of(counts),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    named = {
        "bad": bad,
        "early": early,
        "biased": biased,
        "seen": seen,
        **({} if allowed is None else {"allowed": allowed}),
    }
    for name, token_ids in named.items():
        own.set_tokens(name, token_ids)

    expected = logits.numpy().copy()
    expected[masked] = -np.inf
    if allowed is not None:
        expected = np.where(np.isin(np.arange(vocab), allowed), expected, -np.inf)
    for banned in (bad, early):
        without = expected.copy()
        without[banned] = -np.inf
        expected = without if np.isfinite(without).any() else expected
    expected[biased] += biases
    old = expected[seen]
    expected[seen] = (
        np.where(old < 0, old * repetition, old / repetition) - frequency * counts - presence * (counts > 0)
    )
    changed = logits[None].clone()
    (token,) = choose_tokens(library, changed, [own])
    np.testing.assert_allclose(changed[0].numpy(), expected, rtol=1e-5, atol=1e-5)
    assert token == (int(changed.argmax()) if np.isfinite(expected).any() else -1)


@pytest.mark.parametrize("vocab", [5, 1000])
def test_rows_of_all_kinds_are_chosen_as_alone(library: KernelLibrary, vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0))
    kinds: list[dict[str, float]] = [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.9}]
    rows = [None, *(row(draws=1, temperature=0.8, uniform=0.6, **kind) for kind in kinds)]
    together = choose_tokens(library, logits.clone(), rows)
    alone = [choose_tokens(library, logits[index : index + 1].clone(), [own])[0] for index, own in enumerate(rows)]
    assert together == alone


@pytest.mark.parametrize("top_k", [0, 3000])
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.75, 0.999])
def test_a_nucleus_of_nearly_equal_weights_ends_where_it_should(
    library: KernelLibrary, top_k: int, top_p: float
) -> None:
    """The last of 5,000 tokens that may be drawn, of weights in descending order."""
    logits = torch.linspace(0.0, -0.5, 5000)
    weights = logits.double().exp()[: top_k or 5000]
    size = int((weights.cumsum(-1) < top_p * weights.sum()).sum()) + 1
    own = row(draws=1, temperature=1.0, top_p=top_p, top_k=top_k, uniform=1 - 2**-53)
    (token,) = choose_tokens(library, logits[None].clone(), [own])
    assert abs(token - (size - 1)) <= 1
