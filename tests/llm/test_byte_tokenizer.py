"""The names of tokens in log-probabilities: never empty, and with the blank that they begin with."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from raylens.llm.byte_tokenizer import ByteTokenizer


def test_tokens_of_a_decoder_that_grammars_cannot_use_have_names() -> None:
    tokenizer = Tokenizer(models.Unigram([("▁", -1.0), ("▁a", -1.0), ("a", -1.0)], 0, False))
    tokenizer.decoder = decoders.Metaspace()
    names = ByteTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 5, frozenset())
    with pytest.raises(ValueError, match="decoder"):
        names.matching()
    assert [names.token_bytes(token_id) for token_id in range(5)] == [b" ", b" a", b"a", b"<[3]>", b"<[4]>"]


def test_every_token_has_a_name(shapes: str) -> None:
    """The bundled model's vocabulary has a token for each byte and is padded."""
    names = ByteTokenizer(AutoTokenizer.from_pretrained(shapes), 768, frozenset({2}))
    assert all(names.token_bytes(token_id) for token_id in range(768))
