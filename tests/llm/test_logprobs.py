"""Log-probabilities are those of the model's own logits, whatever a request makes of them."""

import math

import pytest
import torch

from raylens.llm.sampling.logprobs import token_logprobs
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.preprocess.schema import InvalidRequestError
from tests.llm.sampling import sample

VOCAB = 50
LOGITS = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_they_are_log_softmax_and_its_largest() -> None:
    expected = torch.log_softmax(LOGITS, dim=-1)
    found = token_logprobs(LOGITS.clone(), [3, 1, 4, 1], [0, 1, 5, 1000])
    for row, (token_id, own, num_top) in enumerate(zip([3, 1, 4, 1], found, [0, 1, 5, VOCAB], strict=True)):
        assert own.token_id == token_id
        assert own.logprob == expected[row, token_id].item()
        order = expected[row].argsort(descending=True).tolist()
        assert own.rank == order.index(token_id) + 1
        assert own.top == [(one, expected[row, one].item()) for one in order[:num_top]]
    assert token_logprobs(torch.empty(0, VOCAB), [], []) == []


def test_settings_and_neighbours_do_not_change_them() -> None:
    params = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=2.0, seed=1, top_k=1, logit_bias={9: 100.0}, logprobs=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, repetition_penalty=2.0, min_tokens=3, logprobs=3),
    ]
    states = [SamplerState(one, (7,), vocab_size=VOCAB, eos_token_ids=frozenset({2})) for one in params]
    sampled = sample(LOGITS.clone(), states)
    for row, (token, wanted) in enumerate(zip(sampled, (2, 0, None, 3), strict=True)):
        assert token is not None
        if wanted is None:
            assert token.logprobs is None
        else:
            assert token.logprobs == token_logprobs(LOGITS[row][None], [token.token_id], [wanted])[0]
    assert sampled[1] is not None
    assert sampled[1].token_id == 9


def test_named_tokens_take_the_place_of_the_likeliest() -> None:
    named = [(), (5, 9, 3), (), (9,)]
    params = [SamplingParams(temperature=0.0, logprobs=2, logprob_token_ids=one) for one in named]
    params[2] = SamplingParams(temperature=0.0)
    states = [SamplerState(one, (7,), vocab_size=VOCAB, eos_token_ids=frozenset({2})) for one in params]
    expected = torch.log_softmax(LOGITS, dim=-1)
    told = [None if token is None else token.logprobs for token in sample(LOGITS.clone(), states)]
    assert told[2] is None
    for row in (0, 1, 3):
        logprobs = told[row]
        assert logprobs is not None
        ids = named[row] or tuple(expected[row].argsort(descending=True)[:2].tolist())
        assert logprobs.top == [(one, expected[row, one].item()) for one in ids]


@pytest.mark.parametrize("ids", [(VOCAB,), (-1,), (0,) * 129])
def test_named_tokens_are_in_the_vocabulary_and_not_too_many(ids: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="logprob_token_ids"):
        SamplerState(
            SamplingParams(logprobs=0, logprob_token_ids=ids), (7,), vocab_size=VOCAB, eos_token_ids=frozenset()
        )


def test_a_token_that_the_model_excludes_has_none_left() -> None:
    logits = LOGITS[:1].clone()
    logits[0, 5] = -torch.inf
    assert token_logprobs(logits, [5], [1])[0].logprob == -math.inf
