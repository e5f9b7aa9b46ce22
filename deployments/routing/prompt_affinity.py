"""Computes a prompt's affinity from its prefix, see `deployments/routing/prefix_router.py`."""

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from raylens.deployments.routing.prefix_router import PromptAffinity
from raylens.preprocess.schema import (
    ChatPrompt,
    InterleavedPrompt,
    Message,
    PooledPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
    parts_of,
)

_MARK_BYTES = 256
_MOST_MARKS = 64
"""Marks of one prompt; they cover its first 16 kB."""
_MOST_BYTES = _MARK_BYTES * _MOST_MARKS
_DIGEST_BYTES = 6


def affinity_of(prompt: Prompt, mm_hashes: Sequence[str], *, salt: str, key: str | None = None) -> PromptAffinity:
    """Returns the prompt's affinity. `mm_hashes`: those of its items, in prompt order. Prompts of different `salt`
    share nothing. `key`: the client's own grouping; by default, conversations with the same first turn belong together,
    and so do identical other prompts."""
    beginning = bytearray()
    first_turn = _hash_of(salt)
    is_first_turn = True
    for part, ends_turn in _parts(prompt, mm_hashes):
        if is_first_turn:
            first_turn.update(part)
            is_first_turn = not ends_turn
        beginning += part[: _MOST_BYTES - len(beginning)]
        if len(beginning) == _MOST_BYTES and not is_first_turn:
            break
    named = first_turn if key is None else _hash_of(salt, key)
    return PromptAffinity(named.hexdigest(), list(_marks(salt, beginning)))


def _marks(salt: str, beginning: bytearray) -> Iterator[str]:
    begun = _hash_of(salt)
    for start in range(0, len(beginning) - _MARK_BYTES + 1, _MARK_BYTES):
        begun.update(beginning[start : start + _MARK_BYTES])
        yield begun.hexdigest()


def _parts(prompt: Prompt, mm_hashes: Sequence[str]) -> Iterator[tuple[bytes, bool]]:
    """Yields the prompt in pieces, an item as its hash, each with whether it ends a user's turn."""
    hashes = iter(mm_hashes)
    if isinstance(prompt, ChatPrompt):
        if prompt.tools or prompt.template_kwargs or prompt.template:
            yield _encoded(json.dumps([prompt.tools, prompt.template_kwargs, prompt.template])), False
        for message in prompt.messages:
            yield from ((part, False) for part in _parts_of(message, hashes))
            yield b"\n", message["role"] == "user"
    elif isinstance(prompt, InterleavedPrompt):
        for part in prompt.parts:
            yield _encoded(next(hashes, "") if part is None else part), False
    else:
        # Only the processor knows the items' positions in the prompt.
        yield _encoded("".join(hashes)), False
        yield _encoded(_text_of(prompt)), False


def _text_of(prompt: TextPrompt | TokensPrompt | PooledPrompt) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, TokensPrompt):
        return " ".join(map(str, prompt.token_ids))
    return json.dumps([prompt.instruction, prompt.purpose, prompt.query, prompt.content])


def _parts_of(message: Message, hashes: Iterator[str]) -> Iterator[bytes]:
    others: dict[str, Any] = {name: value for name, value in message.items() if name != "content"}
    yield _encoded(json.dumps(others))
    for part in parts_of(message):
        yield _encoded(part["text"] if part["type"] == "text" else next(hashes, ""))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _hash_of(*texts: str) -> blake2b:
    return blake2b(_encoded("\0".join(texts)), digest_size=_DIGEST_BYTES)
