"""The ranking by a key."""

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylens.deployments.routing.replica_choice import rank

KEYS = [f"key-{number}" for number in range(40)]

replica_names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)
keys = st.text(max_size=20)


@given(keys, replica_names, st.randoms())
def test_the_order_of_the_replicas_does_not_matter(key: str, replicas: list[str], random: Any) -> None:
    ranked = rank(key, replicas)
    assert sorted(ranked) == sorted(replicas)
    random.shuffle(replicas)
    assert rank(key, replicas) == ranked


@given(keys, replica_names, st.data())
def test_without_a_replica_the_others_keep_their_order(key: str, replicas: list[str], data: Any) -> None:
    """So the keys of a replica that goes move to the second of their ranking, and no other key moves."""
    gone = data.draw(st.sampled_from(replicas))
    left = [replica for replica in replicas if replica != gone]
    assert rank(key, left) == [replica for replica in rank(key, replicas) if replica != gone]


@pytest.mark.parametrize("num_replicas", [2, 3, 10])
def test_keys_are_spread_evenly(num_replicas: int) -> None:
    replicas = [f"replica-{number}" for number in range(num_replicas)]
    ranks = [rank(str(key), replicas) for key in range(10_000)]
    fair = 10_000 / num_replicas
    for position in (0, -1):
        counts = Counter(ranked[position] for ranked in ranks)
        assert all(abs(counts[replica] - fair) < 0.12 * fair for replica in replicas), counts
    # The keys of one replica spread over all others when it goes.
    seconds = Counter(ranked[1] for ranked in ranks if ranked[0] == "replica-0")
    fair = seconds.total() / (num_replicas - 1)
    assert all(abs(seconds[replica] - fair) < 0.3 * fair for replica in replicas[1:]), seconds


def test_every_process_ranks_alike() -> None:
    replicas = [f"replica-{number}" for number in range(5)]
    code = "from raylens.deployments.routing.replica_choice import rank; "
    code += f"print([rank(key, {replicas}) for key in {KEYS}])"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert printed.stdout.strip() == str([rank(key, replicas) for key in KEYS])


def test_half_a_surrogate_pair_is_a_key() -> None:
    assert rank("\ud83d", ["a", "b"]) != []
