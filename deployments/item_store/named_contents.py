"""Maps the names (`uuid`) that clients gave to items to content hashes."""

from collections import OrderedDict


class NamedContents:
    """The content hash of each tenant's name. An LRU of `max_names` names.

    A name stands for content and is never a cache key, so a client cannot get another tenant's data by its name.
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
        """Returns the hash of the tenant's latest content under the name, None if unknown."""
        found = self._hashes.get((cache_salt, name))
        if found is not None:
            self._hashes.move_to_end((cache_salt, name))
        return found
