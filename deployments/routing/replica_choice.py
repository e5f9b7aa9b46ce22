"""The choice between two replicas by their loads: pure functions, without Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """The calls on a replica, of at most `limit`; `num_ongoing` is None when it is not known."""

    num_ongoing: int | None
    limit: int

    @property
    def is_full(self) -> bool:
        return self.num_ongoing is not None and self.num_ongoing >= self.limit


def two_choices(shuffled: Sequence[str], loads: Mapping[str, Load]) -> list[list[str]]:
    """For a call without a key: two at random, should these be gone the others, and last all full ones."""
    full = [replica_id for replica_id in shuffled if loads[replica_id].is_full]
    with_room = [replica_id for replica_id in shuffled if not loads[replica_id].is_full]
    return [group for group in (with_room[:2], with_room[2:], full) if group]
