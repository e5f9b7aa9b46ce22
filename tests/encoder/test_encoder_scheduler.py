"""Which items are encoded together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.scheduler import EncoderScheduler
from encoder.schema import EncodeRequest


def request(name: str, width: int) -> EncodeRequest:
    return EncodeRequest(name, {"pixel_values": torch.zeros(3, 1, width)}, 0.0)


@settings(max_examples=50, deadline=None)
@given(widths=st.lists(st.integers(1, 3), max_size=20), max_batch_size=st.integers(1, 4))
def test_every_item_is_taken_once_in_batches_of_one_shape(widths: list[int], max_batch_size: int) -> None:
    scheduler = EncoderScheduler(max_batch_size)
    for i, width in enumerate(widths):
        scheduler.add(request(str(i), width))
    taken: list[str] = []
    while batch := scheduler.schedule():
        assert len(batch) <= max_batch_size
        assert len({item.batch_key for item in batch}) == 1
        oldest_left = min(i for i in range(len(widths)) if str(i) not in taken)
        assert batch[0].request_id == str(oldest_left)
        taken += [item.request_id for item in batch]
    assert sorted(taken, key=int) == [str(i) for i in range(len(widths))]
    assert len(scheduler) == 0


def test_an_aborted_item_is_not_encoded() -> None:
    scheduler = EncoderScheduler(4)
    scheduler.add(request("a", 1))
    scheduler.add(request("b", 1))
    scheduler.abort("a")
    scheduler.abort("unknown")
    assert [item.request_id for item in scheduler.schedule()] == ["b"]


def test_an_item_cannot_wait_twice() -> None:
    scheduler = EncoderScheduler(4)
    scheduler.add(request("a", 1))
    with pytest.raises(ValueError, match="a is waiting"):
        scheduler.add(request("a", 1))
