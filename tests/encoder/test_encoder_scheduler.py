"""Which items are encoded together: within the budget, each once, none too late."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from encoder.scheduler import EncoderScheduler
from encoder.schema import EncodeRequest


def request(name: str, num_patches: int, kind: str = "image") -> EncodeRequest:
    return EncodeRequest(name, kind, {}, num_patches, kind, 0.0)


def names(batch: list[EncodeRequest]) -> list[str]:
    return [item.request_id for item in batch]


class Traffic(RuleBasedStateMachine):
    """Items come, go away and are encoded in any order."""

    @initialize(max_batch_patches=st.integers(1, 12))
    def start(self, max_batch_patches: int) -> None:
        self.scheduler = EncoderScheduler(max_batch_patches)
        self.waiting: dict[str, EncodeRequest] = {}
        self.latest: dict[str, int] = {}  # number of the last batch that an item may be in
        self.num_batches = self.num_items = 0
        self.last_had_big = False

    @rule(num_patches=st.integers(1, 15), kind=st.sampled_from(["image", "video", "tall image"]))
    def arrives(self, num_patches: int, kind: str) -> None:
        item = request(str(self.num_items), num_patches, kind)
        self.num_items += 1
        self.latest[item.request_id] = self.num_batches + 2 * (len(self.waiting) + 1)
        self.waiting[item.request_id] = item
        self.scheduler.add(item)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def goes_away(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[gone]
        self.scheduler.abort(gone)

    @rule()
    def is_encoded(self) -> None:
        batch = self.scheduler.schedule()
        self.num_batches += bool(batch)
        assert bool(batch) == bool(self.waiting)
        small_waited = any(not self.scheduler.is_big(item) for item in self.waiting.values())
        for item in batch:
            assert self.waiting.pop(item.request_id) is item, "taken once, and not after it went away"
            assert self.num_batches <= self.latest[item.request_id], "starved"
        assert len(batch) <= 1 or sum(item.num_patches for item in batch) <= self.scheduler.max_batch_patches
        assert len({item.batch_key for item in batch}) <= 1
        has_big = any(self.scheduler.is_big(item) for item in batch)
        assert not (has_big and self.last_had_big and small_waited), "two big ones in a row before a small one"
        self.last_had_big = has_big

    @invariant()
    def knows_what_waits(self) -> None:
        assert len(self.scheduler) == len(self.waiting)
        assert all(self.num_batches < self.latest[name] for name in self.waiting), "starved"


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=30))
def test_a_queue_of_one_kind_takes_about_as_few_batches_as_it_can(sizes: list[int]) -> None:
    """First fit: batches of small items are more than half full, but the last."""
    scheduler = EncoderScheduler(8)
    for index, size in enumerate(sizes):
        scheduler.add(request(str(index), size))
    num_batches = 0
    while scheduler.schedule():
        num_batches += 1
    num_big = sum(size > 4 for size in sizes)
    assert num_batches <= num_big + math.ceil(2 * sum(size for size in sizes if size <= 4) / 8) + 1


def test_small_ones_do_not_wait_behind_several_big_ones() -> None:
    scheduler = EncoderScheduler(10)
    for index in range(3):
        scheduler.add(request(f"big {index}", 10))
    for index in range(3):
        scheduler.add(request(f"small {index}", 2))
    batches = [names(scheduler.schedule()) for _ in range(4)]
    assert batches == [["big 0"], ["small 0", "small 1", "small 2"], ["big 1"], ["big 2"]]


def test_small_ones_take_no_big_one_along() -> None:
    scheduler = EncoderScheduler(10)
    for name, size in (("small", 2), ("big", 6), ("also small", 3)):
        scheduler.add(request(name, size))
    assert names(scheduler.schedule()) == ["small", "also small"]


def test_a_big_one_is_not_starved_by_small_ones_that_keep_coming() -> None:
    scheduler = EncoderScheduler(4)
    scheduler.add(request("small 0", 2))
    scheduler.add(request("big", 4))
    for index in range(1, 4):
        scheduler.add(request(f"small {index}", 2))
        scheduler.add(request(f"small {index} again", 2))
        if "big" in names(scheduler.schedule()):
            return
    raise AssertionError("the big one still waits")


def test_what_is_left_of_a_big_ones_batch_is_filled() -> None:
    scheduler = EncoderScheduler(10)
    for name, size in (("big", 6), ("too much", 5), ("first", 3), ("does not fit", 2), ("second", 1)):
        scheduler.add(request(name, size))
    assert names(scheduler.schedule()) == ["big", "first", "second"]


def test_one_over_the_budget_goes_alone() -> None:
    scheduler = EncoderScheduler(4)
    scheduler.add(request("huge", 9))
    scheduler.add(request("small", 1))
    assert names(scheduler.schedule()) == ["huge"]
    assert names(scheduler.schedule()) == ["small"]


def test_an_item_cannot_wait_twice() -> None:
    scheduler = EncoderScheduler(4)
    scheduler.add(request("a", 1))
    with pytest.raises(ValueError, match="a is waiting"):
        scheduler.add(request("a", 1))
