"""Where items are encoded: by what they cost there, on a clock of the test's own."""

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from raylens.deployments.item_store.encoder_choice import EncoderPlace, cheapest
from raylens.deployments.wire.stage_messages import EmbeddingInfo

MEGAPIXEL = 2**20


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Places:
    """Generate, and an Encode that may rest."""

    def __init__(self, *, has_encode: bool = True) -> None:
        handle: Any = SimpleNamespace(encode=None)
        self.has_encode = has_encode
        self.generate = EncoderPlace("generate", handle, lambda: True)
        self.encode = EncoderPlace("encode", handle, lambda: self.has_encode)

    def choose(self, num_pixels: int = MEGAPIXEL) -> str:
        return cheapest([self.generate, self.encode], num_pixels).stage


def info(seconds: float, num_decoding: int = 0) -> EmbeddingInfo:
    return EmbeddingInfo(1, 0.0, 0.0, seconds, num_decoding)


def send(place: EncoderPlace, seconds: float, num_decoding: int = 0) -> None:
    with place.call(MEGAPIXEL) as answered:
        answered(info(seconds, num_decoding))


def test_an_item_alone_is_encoded_in_generate(clock: Clock) -> None:
    places = Places()
    assert places.choose() == "generate"
    send(places.generate, 0.1)
    send(places.encode, 0.1)
    assert places.choose() == "generate"


def test_items_go_where_fewer_are(clock: Clock) -> None:
    places = Places()
    send(places.generate, 0.1)
    send(places.encode, 0.1)
    with places.generate.call(MEGAPIXEL):
        assert places.choose() == "encode"
        with places.encode.call(2 * MEGAPIXEL):
            assert places.choose() == "generate"


def test_items_go_where_they_are_encoded_faster(clock: Clock) -> None:
    places = Places()
    send(places.generate, 0.4)
    send(places.encode, 0.1)
    with places.encode.call(2 * MEGAPIXEL):
        assert places.choose() == "encode"
        with places.encode.call(MEGAPIXEL):
            assert places.choose() == "generate"


def test_answers_that_are_decoded_wait_too_and_are_forgotten_with_time(clock: Clock) -> None:
    places = Places()
    send(places.generate, 0.1, num_decoding=8)
    send(places.encode, 0.3)
    assert places.choose() == "encode"
    clock.now += 1
    assert places.choose() == "encode"
    clock.now += 2
    assert places.choose() == "generate"


def test_a_stage_at_rest_is_started_only_by_a_heavy_load(clock: Clock) -> None:
    places = Places(has_encode=False)
    send(places.generate, 0.5)
    with ExitStack() as calls:
        for _ in range(9):
            assert places.choose() == "generate"
            calls.enter_context(places.generate.call(MEGAPIXEL))
        calls.enter_context(places.generate.call(MEGAPIXEL))
        assert places.choose() == "encode", "a start takes 5 seconds, as far as is known"


def test_a_start_is_measured_and_is_no_part_of_the_pace(clock: Clock) -> None:
    places = Places(has_encode=False)
    send(places.generate, 0.5)
    with places.encode.call(MEGAPIXEL) as answered:
        clock.now += 20
        places.has_encode = True
        answered(info(0.1))
    assert places.encode.cost(MEGAPIXEL) == 0
    places.has_encode = False
    assert places.encode.cost(MEGAPIXEL) == 20


def test_a_call_that_fails_leaves_nothing(clock: Clock) -> None:
    places = Places()
    send(places.generate, 0.5)
    cost = places.generate.cost(MEGAPIXEL)
    with pytest.raises(RuntimeError), places.generate.call(MEGAPIXEL):
        raise RuntimeError
    assert places.generate.cost(MEGAPIXEL) == cost


def test_tensors_without_a_pixel_are_work_too(clock: Clock) -> None:
    places = Places()
    with places.generate.call(0) as answered:
        answered(info(0.5))
    assert places.generate.cost(0) == 0.5
