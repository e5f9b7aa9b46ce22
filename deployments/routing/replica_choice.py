"""Chooses a replica for a call by the replicas' loads, or for a key. Independent of Ray, so a simulation can use it."""

from collections.abc import Iterable, Mapping, Sequence
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


def two_choices(shuffled: Sequence[str], loads: Mapping[str, Load]) -> list[list[str]]:
    """Returns groups of replicas to try in turn: two random ones with room, the others with room, all full ones."""
    full = [replica_id for replica_id in shuffled if loads[replica_id].is_full]
    with_room = [replica_id for replica_id in shuffled if not loads[replica_id].is_full]
    return [group for group in (with_room[:2], with_room[2:], full) if group]


def least_loaded(loads: Mapping[ReplicaT, Load]) -> ReplicaT | None:
    """Returns the replica with the fewest calls, None if no load is known or all are full.

    A report may predate the end of a call, so fewer calls in flight break a tie."""
    known = {one: load for one, load in loads.items() if load.reported is not None and not load.is_full}
    return min(known, key=lambda one: (known[one].num_calls, known[one].in_flight), default=None)


def rank(key: str, ids: Iterable[str]) -> list[str]:
    """Returns the ids in the key's order of preference, by rendezvous hashing: all processes rank replicas or shards
    identically, without communication. If one is added or removed, only its own keys move."""
    return sorted(ids, key=lambda one: (_weight(key, one), one), reverse=True)


def _weight(key: str, one: str) -> bytes:
    # A key may come from a client's JSON, which allows half a surrogate pair.
    return blake2b(f"{one}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
