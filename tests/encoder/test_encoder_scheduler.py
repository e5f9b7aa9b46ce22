"""What is encoded together: within the budget, each segment once and in order, small items soon, none too late."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raylens.encoder.scheduler import EncoderScheduler
from raylens.encoder.schema import EncodeRequest, ScheduledSegment, Segment


def request(name: str, *num_patches: int, kind: str = "image") -> EncodeRequest:
    """Returns an item with a segment of each of `num_patches`."""
    return EncodeRequest(name, kind, [Segment({}, number) for number in num_patches], kind, 0.0)


def names(batch: Sequence[ScheduledSegment]) -> list[str]:
    return [segment.request.request_id for segment in batch]


def size(batch: Sequence[ScheduledSegment]) -> int:
    return sum(segment.num_patches for segment in batch)


@dataclass
class Waiting:
    """What the test knows of an item. `batches_left`: in how many more batches of the oldest item it must be done."""

    request: EncodeRequest
    batches_left: int
    next_index: int = 0

    @property
    def patches_left(self) -> int:
        return sum(segment.num_patches for segment in self.request.segments[self.next_index :])

    @property
    def segments_left(self) -> int:
        return len(self.request.segments) - self.next_index

    @property
    def next_patches(self) -> int:
        return self.request.segments[self.next_index].num_patches


class Traffic(RuleBasedStateMachine):
    """Items come, go away and are encoded in any order."""

    @initialize(max_batch_patches=st.integers(1, 12))
    def start(self, max_batch_patches: int) -> None:
        self.most = max_batch_patches
        self.scheduler = EncoderScheduler(max_batch_patches)
        self.waiting: dict[str, Waiting] = {}
        self.num_items = 0
        self.allowed = max_batch_patches  # of patches, before the oldest leads again
        self.others = 0  # patches since it last led
        self.oldest_led = False

    @rule(sizes=st.lists(st.integers(1, 15), min_size=1, max_size=4), kind=st.sampled_from(["image", "video", "tall"]))
    def arrives(self, sizes: list[int], kind: str) -> None:
        item = request(str(self.num_items), *sizes, kind=kind)
        self.num_items += 1
        older = sum(waiting.segments_left for waiting in self.waiting.values())
        self.waiting[item.request_id] = Waiting(item, older + len(sizes))
        self.scheduler.add(item)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def goes_away(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.scheduler.abort(gone) is self.waiting.pop(gone).request
        assert self.scheduler.abort(gone) is None

    @rule()
    def is_encoded(self) -> None:
        oldest = next(iter(self.waiting.values()), None)
        small = [item.patches_left for item in self.waiting.values() if item.next_patches <= self.most]
        batch = self.scheduler.schedule()
        assert bool(batch) == bool(self.waiting)
        if not batch or oldest is None:
            return
        assert len(batch) == 1 or size(batch) <= self.most
        assert len({segment.request.batch_key for segment in batch}) == 1
        assert len(set(names(batch))) == len(batch), "two segments of an item in one batch"
        led_by_oldest = batch[0].request is oldest.request
        if led_by_oldest and self.oldest_led:
            assert all(left >= oldest.patches_left for left in small), "a small one waited for two batches"
        self.oldest_led = led_by_oldest
        for segment in batch:
            self.takes(segment)
        self.ages(batch, led_by_oldest)

    def takes(self, segment: ScheduledSegment) -> None:
        item = self.waiting[segment.request.request_id]
        assert (segment.request, segment.index) == (item.request, item.next_index), "once each, and in their order"
        item.next_index += 1
        assert segment.is_last == (item.segments_left == 0)
        if segment.is_last:
            del self.waiting[segment.request.request_id]

    def ages(self, batch: Sequence[ScheduledSegment], led_by_oldest: bool) -> None:
        if led_by_oldest:
            self.allowed, self.others = max(self.most, size(batch)), 0
            for item in self.waiting.values():
                item.batches_left -= 1
        else:
            self.others += size(batch)
            assert self.others <= self.allowed, "the oldest item waits for too much"

    @invariant()
    def knows_what_waits(self) -> None:
        assert len(self.scheduler) == len(self.waiting)
        assert all(item.batches_left > 0 for item in self.waiting.values()), "starved"


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=20))
def test_every_segment_is_encoded_once(sizes: list[list[int]]) -> None:
    scheduler = EncoderScheduler(8)
    for index, own in enumerate(sizes):
        scheduler.add(request(str(index), *own))
    encoded: dict[str, list[int]] = {}
    while batch := scheduler.schedule():
        for segment in batch:
            encoded.setdefault(segment.request.request_id, []).append(segment.num_patches)
    assert encoded == {str(index): own for index, own in enumerate(sizes)}


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 8), min_size=1, max_size=30))
def test_a_queue_of_one_kind_takes_about_as_few_batches_as_it_can(sizes: list[int]) -> None:
    """First fit: of any two batches of small items, more than one is filled."""
    scheduler = EncoderScheduler(8)
    for index, own in enumerate(sizes):
        scheduler.add(request(str(index), own))
    num_batches = 0
    while scheduler.schedule():
        num_batches += 1
    num_big = sum(own > 4 for own in sizes)
    assert num_batches <= num_big + math.ceil(2 * sum(own for own in sizes if own <= 4) / 8) + 1


def test_a_small_one_waits_for_none_of_sixteen_large_ones_but_that_which_is_encoded() -> None:
    scheduler = EncoderScheduler(10)
    for index in range(16):
        scheduler.add(request(f"large {index}", 10))
    assert [names(scheduler.schedule()) for _ in range(3)] == [["large 0"], ["large 1"], ["large 2"]]
    scheduler.add(request("small", 2))
    assert [names(scheduler.schedule()) for _ in range(2)] == [["small"], ["large 3"]]


def test_a_small_one_goes_between_the_segments_of_a_long_video() -> None:
    scheduler = EncoderScheduler(10)
    scheduler.add(request("video", *[10] * 9, 4, kind="video"))
    assert names(scheduler.schedule()) == ["video"]
    scheduler.add(request("small", 2))
    assert [names(scheduler.schedule()) for _ in range(2)] == [["small"], ["video"]]


def test_the_shortest_is_the_one_that_has_the_fewest_patches_left() -> None:
    scheduler = EncoderScheduler(10)
    for name, sizes in (("oldest", [9] * 4), ("nearly done", [9, 1]), ("picture", [8])):
        scheduler.add(request(name, *sizes))
    batches = [names(scheduler.schedule()) for _ in range(5)]
    assert batches == [["oldest"], ["picture"], ["oldest"], ["nearly done"], ["oldest", "nearly done"]]


def test_small_ones_take_no_big_one_along() -> None:
    scheduler = EncoderScheduler(10)
    for name, own in (("small", 2), ("big", 6), ("also small", 3)):
        scheduler.add(request(name, own))
    assert names(scheduler.schedule()) == ["small", "also small"]


def test_a_large_one_is_not_starved_by_small_ones_that_keep_coming() -> None:
    scheduler = EncoderScheduler(4)
    scheduler.add(request("large", 4, 4, 4))
    batches = []
    for index in range(6):
        scheduler.add(request(f"small {index}", 3))
        batches.append(names(scheduler.schedule()))
    assert batches == [["large"], ["small 0"], ["large"], ["small 1"], ["large"], ["small 2"]]


def test_small_ones_get_as_many_patches_as_an_item_of_several_batches() -> None:
    scheduler = EncoderScheduler(4)
    for index in range(2):
        scheduler.add(request(f"huge {index}", 12))
    for index in range(5):
        scheduler.add(request(f"small {index}", 4))
    assert [names(scheduler.schedule())[0] for _ in range(7)] == [
        *("huge 0", "small 0", "small 1", "small 2"),
        *("huge 1", "small 3", "small 4"),
    ]


def test_what_is_left_of_a_big_ones_batch_is_filled() -> None:
    scheduler = EncoderScheduler(10)
    for name, own in (("big", 6), ("too much", 5), ("first", 3), ("does not fit", 2), ("second", 1)):
        scheduler.add(request(name, own))
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
