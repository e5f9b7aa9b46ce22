"""The order of ids by a key: of few by their rank, of many on a ring."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylens.deployments.routing.replica_choice import HashRing, rank

Order = Callable[[str, list[str]], list[str]]


def on_ring(key: str, ids: Iterable[str]) -> list[str]:
    ring = HashRing()
    ring.set(ids)
    return list(ring.order(key))


KEYS = [f"key-{number}" for number in range(40)]
ORDERS = pytest.mark.parametrize("order", [rank, on_ring])

names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)
keys = st.text(max_size=20)


@ORDERS
@given(keys, names, st.randoms())
def test_the_order_of_the_ids_does_not_matter(order: Order, key: str, ids: list[str], random: Any) -> None:
    ordered = order(key, ids)
    assert sorted(ordered) == sorted(ids)
    random.shuffle(ids)
    assert order(key, ids) == ordered


@ORDERS
@given(keys, names, st.data())
def test_without_an_id_the_others_keep_their_order(order: Order, key: str, ids: list[str], data: Any) -> None:
    """So the keys of a replica that goes move to the second in their order, and no other key moves."""
    gone = data.draw(st.sampled_from(ids))
    assert order(key, [one for one in ids if one != gone]) == [one for one in order(key, ids) if one != gone]


@given(keys, names, names)
def test_a_ring_that_changes_orders_like_a_new_one(key: str, before: list[str], after: list[str]) -> None:
    ring = HashRing()
    for ids in (before, after):
        ring.set(ids)
    assert list(ring.order(key)) == on_ring(key, after)


@pytest.mark.parametrize("num_ids", [2, 3, 10])
def test_keys_are_spread_evenly(num_ids: int) -> None:
    ids = [f"id-{number}" for number in range(num_ids)]
    ring = HashRing()
    ring.set(ids)
    for orders, most in (
        ([rank(str(key), ids) for key in range(10_000)], 0.12),
        ([list(ring.order(str(key))) for key in range(10_000)], 0.4),
    ):
        fair = 10_000 / num_ids
        for position in (0, -1):
            counts = Counter(order[position] for order in orders)
            assert all(abs(counts[one] - fair) < most * fair for one in ids), counts
        # The keys of one id spread over all others when it goes.
        seconds = Counter(order[1] for order in orders if order[0] == "id-0")
        fair = seconds.total() / (num_ids - 1)
        assert all(abs(seconds[one] - fair) < 0.5 * fair for one in ids[1:]), seconds


def test_every_process_orders_alike() -> None:
    ids = [f"id-{number}" for number in range(5)]
    code = "from raylens.deployments.routing.replica_choice import HashRing, rank; ring = HashRing(); "
    code += f"ring.set({ids}); print([(rank(key, {ids}), list(ring.order(key))) for key in {KEYS}])"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert printed.stdout.strip() == str([(rank(key, ids), on_ring(key, ids)) for key in KEYS])


@ORDERS
def test_half_a_surrogate_pair_is_a_key(order: Order) -> None:
    assert order("\ud83d", ["a", "b"]) != []
