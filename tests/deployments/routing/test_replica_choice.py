"""The choice of a replica by loads."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from raylens.deployments.routing.replica_choice import Load, least_loaded, two_choices

loads = st.builds(Load, st.none() | st.integers(0, 20), st.integers(0, 20), st.booleans())


@given(st.dictionaries(st.text(min_size=1, max_size=8), loads))
def test_two_replicas_with_room_come_first_and_full_ones_last(loads: dict[str, Load]) -> None:
    with_room = [replica for replica, load in loads.items() if not load.is_full]
    full = [replica for replica in loads if replica not in with_room]
    order = two_choices(list(loads), loads)
    assert order == [group for group in (with_room[:2], with_room[2:], full) if group]


def test_the_replica_with_the_fewest_calls_is_taken() -> None:
    assert least_loaded({"reported": Load(2, 0), "sent": Load(0, 2), "resting": Load(1, 1)}) == "resting"
    assert least_loaded({"sent": Load(1, 1), "ended meanwhile": Load(1, 0)}) == "ended meanwhile"


def test_unknown_and_full_replicas_are_not_taken() -> None:
    loads = {"unknown": Load(None, 0), "full": Load(0, 0, is_full=True)}
    assert least_loaded(loads) is None
    assert least_loaded({**loads, "known": Load(5, 5)}) == "known"


def test_the_choice_needs_no_ray() -> None:
    code = "import sys, raylens.deployments.routing.replica_choice; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
