"""Finds the end of the thoughts before an answer, token by token."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class EndOfThoughts:
    """`token_bytes`: returns a token's bytes. `tag`: ends the thoughts."""

    token_bytes: Callable[[int], bytes]
    tag: str
    _last: bytes = field(default=b"", init=False)

    def __call__(self, token_id: int) -> bool:
        """Takes the next token. Returns whether the thoughts end with it."""
        tag = self.tag.encode()
        seen = self._last + self.token_bytes(token_id)
        self._last = seen[len(seen) - len(tag) + 1 :] if len(seen) >= len(tag) else seen
        return tag in seen
