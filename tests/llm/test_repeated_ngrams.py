"""Tokens that would repeat a run of tokens, the same as transformers finds in an answer alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from raylens.llm.sampling.repeated_ngrams import RepeatedNgrams

VOCAB_SIZE = 5


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40))
def test_the_banned_tokens_are_those_of_transformers(size: int, answer: list[int]) -> None:
    ngrams = RepeatedNgrams(size)
    for end, token_id in enumerate(answer, 1):
        ngrams.append(token_id)
        scores = NoRepeatNGramLogitsProcessor(size)(torch.tensor([answer[:end]]), torch.zeros(1, VOCAB_SIZE))
        assert ngrams.completing().tolist() == torch.isinf(scores[0]).nonzero().flatten().tolist()
