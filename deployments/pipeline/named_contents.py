"""The content hashes behind the names (`uuid`) that clients gave to their items."""

from collections import OrderedDict


class NamedContents:
    """The content hash for each tenant's name; the least recently used names are forgotten.

    A name stands for content and is never itself a cache key: whoever guesses or repeats one gets no other data than
    its tenant sent.
    """

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._hashes: OrderedDict[tuple[str, str], str] = OrderedDict()

    def remember(self, cache_salt: str, name: str, hashed_content: str) -> None:
        self._hashes[cache_salt, name] = hashed_content
        self._hashes.move_to_end((cache_salt, name))
        while len(self._hashes) > self._max_names:
            self._hashes.popitem(last=False)

    def find(self, cache_salt: str, name: str) -> str | None:
        """The hash of what the tenant last sent under the name, if it is known."""
        found = self._hashes.get((cache_salt, name))
        if found is not None:
            self._hashes.move_to_end((cache_salt, name))
        return found
