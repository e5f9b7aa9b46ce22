"""The content hashes behind the names (`uuid`) that clients gave to their items."""

from collections import OrderedDict


class NamedContents:
    """The content hash for each tenant's name. Too many names push out the least recently used ones.

    A name stands for content and is never itself a cache key. So a client that guesses or repeats another tenant's name
    does not get that tenant's data.
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
        """Returns the hash of what the tenant last sent under the name, None where it is not known."""
        found = self._hashes.get((cache_salt, name))
        if found is not None:
            self._hashes.move_to_end((cache_salt, name))
        return found
