"""Chooses a replica for a call by the replicas' loads, or for a key. Independent of Ray, so a simulation can use it."""

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

ReplicaT = TypeVar("ReplicaT")


@dataclass(frozen=True, slots=True)
class Load:
    """The calls on a replica.

    `reported`: calls of all callers in the replica's last report, without calls whose arguments are pending; None
    without a report. `in_flight`: this process's unfinished calls. `is_full`: the replica takes no further call of this
    method."""

    reported: int | None
    in_flight: int = 0
    is_full: bool = False

    @property
    def num_calls(self) -> int:
        return max(self.reported or 0, self.in_flight)


def two_choices(shuffled: Sequence[ReplicaT], loads: Mapping[ReplicaT, Load]) -> list[list[ReplicaT]]:
    """Returns groups of replicas to try in turn: two random ones with room, the others with room, all full ones."""
    full = [replica for replica in shuffled if loads[replica].is_full]
    with_room = [replica for replica in shuffled if not loads[replica].is_full]
    return [group for group in (with_room[:2], with_room[2:], full) if group]


def least_loaded(loads: Mapping[ReplicaT, Load]) -> ReplicaT | None:
    """Returns the replica with the fewest calls, None if no load is known or all are full.

    A report may predate the end of a call, so fewer calls in flight break a tie."""
    known = {one: load for one, load in loads.items() if load.reported is not None and not load.is_full}
    return min(known, key=lambda one: (known[one].num_calls, known[one].in_flight), default=None)


def rank(key: str, ids: Iterable[str]) -> list[str]:
    """Returns the ids in the key's order of preference, by rendezvous hashing: all processes rank them identically,
    without communication. If one is added or removed, only its own keys move. For few ids, as it looks at all."""
    return sorted(ids, key=lambda one: (_weight(key, one), one), reverse=True)


class HashRing:
    """Orders ids for a key as `rank` does, but looks at few of many ids (consistent hashing, Karger et al., 1997)."""

    _POINTS = 128  # of an id, whose share of the keys differs from the fair one by a tenth on average

    def __init__(self) -> None:
        self._ids: frozenset[str] = frozenset()
        self._points: list[tuple[bytes, str]] = []

    def set(self, ids: Iterable[str]) -> None:
        before, self._ids = self._ids, frozenset(ids)
        if gone := before - self._ids:
            self._points = [point for point in self._points if point[1] not in gone]
        self._points += [(_weight(str(n), one), one) for one in self._ids - before for n in range(self._POINTS)]
        self._points.sort()

    def order(self, key: str) -> Iterator[str]:
        """Yields the ids in the key's order of preference."""
        begin, seen = bisect(self._points, (_weight(key, ""),)), set[str]()
        for index in range(begin, begin + len(self._points)):
            one = self._points[index % len(self._points)][1]
            if one not in seen:
                seen.add(one)
                yield one


def _weight(key: str, one: str) -> bytes:
    # A key may come from a client's JSON, which allows half a surrogate pair.
    return blake2b(f"{one}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
