"""Converts tokens to bytes, for grammars and for log-probabilities."""

import copy
import functools
import threading
from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer
from transformers import PreTrainedTokenizerFast

_MAX_CACHED_SPELLINGS = 2**14


class ByteTokenizer:
    """The tokens of one model as bytes. Thread-safe. The first use of llguidance's tokenizer takes up to a second."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`tokenizer`: of Hugging Face. `vocab_size`: the width of the model's logits."""
        self._tokenizer = tokenizer
        # The logits may be padded beyond the tokenizer's tokens, and the tokenizer may have more tokens than logits.
        self.vocab_size = max(vocab_size, len(tokenizer))
        self._eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < len(tokenizer))
        self.spellings = functools.lru_cache(maxsize=_MAX_CACHED_SPELLINGS)(self._spell)
        """Returns the distinct tokenizations of a text: at the start of a text, after a space, and inside a text."""
        self._matching: LLTokenizer | None = None
        self._lock = threading.Lock()

    @property
    def special_tokens(self) -> list[str]:
        return list(self._tokenizer.all_special_tokens)

    @property
    def name(self) -> str:
        return type(self._tokenizer).__name__

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of LLTokenizer, which can be sent to another process. Raises ValueError for a tokenizer
        that is not of the `tokenizers` library."""
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"{self.name} is not of the tokenizers library")
        backend = copy.copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        eos_token = self._eos_token_ids or self._tokenizer.eos_token_id
        return {"tokenizer": backend.to_str(), "n_vocab": self.vocab_size, "eos_token": eos_token}

    def matching(self) -> LLTokenizer:
        """Returns llguidance's tokenizer. Raises ValueError as `arguments` does."""
        with self._lock:
            if self._matching is None:
                self._matching = LLTokenizer(**self.arguments())
            return self._matching

    def _spell(self, text: str) -> Sequence[tuple[int, ...]]:
        anchor = self._ids("\n")
        inside = self._ids("\n" + text)
        found = [self._ids(text), self._ids(" " + text.lstrip())]
        if inside[: len(anchor)] == anchor:
            found.append(inside[len(anchor) :])
        return [token_ids for token_ids in dict.fromkeys(found) if token_ids]

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, which may be part of a character. A special token's bytes are its name. A token
        without text, as in padded vocabularies, is named by its number: `<[32015]>`."""
        try:
            found: bytes = self.matching().decode_bytes([token_id])
        except ValueError:
            found = b""
        if found:
            return found
        # Decoded after itself, because some tokenizers drop the space at the start of a text.
        text: str = self._tokenizer.decode([token_id, token_id])
        return text.removeprefix(self._tokenizer.decode([token_id])).encode() or b"<[%d]>" % token_id
