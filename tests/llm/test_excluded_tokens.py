"""Tokens that a request keeps out: all but the allowed, and the last of a bad word's."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.sampling.excluded_tokens import ExcludedTokens
from raylens.llm.sampling.logits_processors import plan_edits
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.preprocess.schema import InvalidRequestError
from tests.llm.planned_edits import apply

VOCAB = 12
EOS = frozenset({7})


def left(excluded: ExcludedTokens, output: list[int], **settings: Any) -> list[int]:
    """The tokens that may follow `output`."""
    state = SamplerState(SamplingParams(**settings), [], vocab_size=VOCAB, eos_token_ids=EOS, excluded=excluded)
    for token_id in output:
        state.append(token_id)
    logits = torch.zeros(2, VOCAB)
    apply(plan_edits, logits, [state, SamplerState(SamplingParams(), [], vocab_size=VOCAB)])
    assert logits[1].isfinite().all(), "nobody else's"
    found: list[int] = logits[0].isfinite().nonzero()[:, 0].tolist()
    return found


def without(*token_ids: int) -> list[int]:
    return [token_id for token_id in range(VOCAB) if token_id not in token_ids]


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], [4]),
        ([1], [4]),
        ([2], [4, 9]),
        ([1, 2], [4, 9, 3]),
        ([0, 1, 2], [4, 9, 3]),
        ([1, 2, 0], [4]),
        ([1, 2, 1], [4, 6]),
    ],
)
def test_the_last_token_of_a_word_is_banned_behind_the_others(output: list[int], banned: list[int]) -> None:
    excluded = ExcludedTokens(words=[(4,), (1, 2, 3), (2, 1, 6), (1, 2, 3), (2, 9)])
    assert left(excluded, output) == without(*banned)


def test_only_allowed_tokens_are_left() -> None:
    assert left(ExcludedTokens(allowed=[5, 3, 5]), []) == [3, 5]
    assert left(ExcludedTokens(allowed=[5, 3], words=[(3,)]), []) == [5]


def test_bad_words_and_min_tokens_give_way_where_nothing_else_is_left() -> None:
    assert left(ExcludedTokens(allowed=[3], words=[(3,)]), []) == [3]
    assert left(ExcludedTokens(allowed=[3, 7], words=[(3,)]), [], min_tokens=5) == [7]
    assert left(ExcludedTokens(allowed=[3, 7]), [], min_tokens=5) == [3]


@pytest.fixture(scope="module")
def tokenizer(shapes: str) -> ByteTokenizer:
    return ByteTokenizer(AutoTokenizer.from_pretrained(shapes), 1, frozenset())


def test_a_word_is_spelt_at_the_start_behind_a_blank_and_inside(tokenizer: ByteTokenizer, shapes: str) -> None:
    plain = AutoTokenizer.from_pretrained(shapes)
    for word in ("red", "zebra crossing", "日本"):
        spellings = tokenizer.spellings(word)
        for text in (word, f" {word}", f"\n{word}"):
            ids = tuple(plain(text, add_special_tokens=False)["input_ids"])
            assert any(ids[-len(spelling) :] == spelling for spelling in spellings), text


def test_a_word_inside_a_text_has_no_mark_of_a_beginning() -> None:
    """Llama's kind of tokenizer puts a blank before every text."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spellings = ByteTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 1, frozenset()).spellings("ab")
    assert {(258, 259), (257, 258, 259)} <= set(spellings)


def test_tokens_outside_the_vocabulary_are_refused(tokenizer: ByteTokenizer) -> None:
    for token_ids in ((5, 700), (-1, 5), (2**70,)):
        with pytest.raises(InvalidRequestError, match="allowed_token_ids: must be of token ids between 0 and 599, got"):
            ExcludedTokens.of(SamplingParams(allowed_token_ids=token_ids), tokenizer, 600)
