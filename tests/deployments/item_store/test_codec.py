"""What an ingress and a shard tell each other arrives as it was sent, and nothing else can."""

import asyncio
from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypeAliasType, TypeVar

from raylens.deployments.item_store import codec
from raylens.deployments.item_store.codec import pack, read
from raylens.deployments.item_store.item_states import ContentMissingError, ItemOrder, ItemTrace
from raylens.deployments.item_store.messages import (
    FROM_INGRESS,
    FROM_SHARD,
    Ask,
    CallMethod,
    Close,
    Failed,
    Made,
    Pending,
    Remember,
    Result,
)
from raylens.deployments.item_store.uploads import Upload
from raylens.deployments.request_context import RequestContext
from raylens.deployments.stages.stage_calls import PlugInFailedError, StageFailedError, StageUnavailableError
from raylens.deployments.wire.private_port import MalformedMessageError, frame
from raylens.preprocess.schema import InvalidRequestError, ItemExpansion, ItemInfo, PlaceholderRange, StageTime
from tests.mutated import mutated

NUMBERS = st.integers(0, 10**9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TEXTS = st.text(max_size=20)
ORDERS = st.builds(
    ItemOrder,
    st.builds(RequestContext, TEXTS, TEXTS, TEXTS),
    TEXTS,
    TEXTS,
    TEXTS,
    st.sampled_from(["image", "video"]),
    st.none() | st.binary(),
    NUMBERS,
    NUMBERS,
    st.dictionaries(TEXTS, JSON, max_size=3),
    st.booleans(),
)
ITEMS = st.builds(
    ItemInfo,
    TEXTS,
    st.builds(
        ItemExpansion,
        st.lists(st.integers(0, 2**31 - 1), max_size=4).map(lambda ids: np.array(ids, np.int32)),
        st.builds(PlaceholderRange, NUMBERS, NUMBERS, st.none() | st.lists(st.booleans(), max_size=4).map(tuple)),
        TEXTS,
        TEXTS,
    ),
    NUMBERS,
    st.booleans(),
    st.just({}),
    st.lists(st.builds(StageTime, TEXTS, st.floats(0, 1e6), st.floats(0, 1e6)), max_size=2).map(tuple),
)
PLAIN_MESSAGES = st.one_of(
    st.builds(Ask, NUMBERS, st.booleans(), ORDERS),
    st.builds(CallMethod, NUMBERS, TEXTS, st.lists(JSON, max_size=3)),
    st.builds(Close, NUMBERS),
    st.builds(Remember, TEXTS, TEXTS, TEXTS),
    st.builds(Result, NUMBERS, st.lists(st.builds(Upload, TEXTS, *[NUMBERS] * 3, TEXTS, TEXTS), max_size=2)),
)
MESSAGES = PLAIN_MESSAGES | st.one_of(
    st.builds(Failed, NUMBERS, st.builds(StageFailedError, TEXTS, TEXTS)),
    st.builds(Result, NUMBERS, ITEMS),
    st.builds(Made, NUMBERS, st.none(), st.builds(ItemTrace, made_for=TEXTS)),
)
"""Of every kind, but for references, which need Ray."""
ARRAY, TUPLE, INTEGER = range(3)
EXPANSION = ItemExpansion(np.arange(3, dtype=np.int32), PlaceholderRange(0, 3), "before", "after")


def sent(message: Any) -> Any:
    async def arrived() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(pack(message))
        return await read(reader, FROM_INGRESS + FROM_SHARD)

    return asyncio.run(arrived())


def is_same(one: Any, other: Any) -> bool:
    """Arrays have no equality of their own."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if is_dataclass(one):
        return all(is_same(getattr(one, part.name), getattr(other, part.name)) for part in fields(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[name]) for name, value in one.items())
    return bool(one == other)


@pytest.mark.long
@given(PLAIN_MESSAGES)
def test_messages_arrive_as_they_were_sent(message: Any) -> None:
    assert sent(message) == message


@pytest.mark.parametrize("is_embed", [None, (True, False, True)])
def test_metadata_of_an_item_arrives_with_its_arrays(is_embed: tuple[bool, ...] | None) -> None:
    expansion = replace(EXPANSION, features=PlaceholderRange(0, 3, is_embed))
    inputs = {"image_grid_thw": np.array([[1, 2, 3]]), "scale": np.array(0.5, np.float32)}
    message = Result(7, ItemInfo("image", expansion, 12, False, inputs, (StageTime("processor", 1.5, 0.5),)))
    assert is_same(sent(message), message)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("too large", field="media", code="media_too_large", status=413, item=2),
        StageUnavailableError("encode", "the encode stage is not available"),
        PlugInFailedError("preprocess", "no such thing"),
        StageFailedError("preprocess", "the preprocess stage failed"),
        ContentMissingError(),
    ],
)
def test_errors_arrive_with_all_that_is_known_of_them(error: Exception) -> None:
    found = sent(Failed(3, error)).error
    assert type(found) is type(error)
    assert (found.args, vars(found)) == (error.args, vars(error))


def test_half_a_surrogate_pair_is_text_like_any_other() -> None:
    message = Remember("tenant", "\ud800", "hash")
    assert sent(message) == message


@pytest.mark.parametrize("value", [object(), {1, 2}, ValueError("x"), print], ids=lambda value: type(value).__name__)
def test_what_no_message_may_hold_is_not_sent(value: object) -> None:
    with pytest.raises(TypeError, match="no message may hold a"):
        pack(Result(1, value))


# What is no message


def read_bytes(body: bytes) -> Any:
    async def arrived() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(body))
        return await read(reader, FROM_INGRESS + FROM_SHARD)

    return asyncio.run(arrived())


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(MESSAGES, st.data())
def test_a_mutated_message_is_a_message_or_one_kind_of_error(message: Any, data: st.DataObject) -> None:
    body = mutated(pack(message)[4:], data)
    try:
        found = read_bytes(body)
    except MalformedMessageError:
        return
    assert isinstance(found, FROM_INGRESS + FROM_SHARD)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_no_message(body: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        read_bytes(body)


def nested(depth: int) -> bytes:
    """Tuples within each other, in msgpack."""
    body = msgpack.packb([])
    for _ in range(depth):
        body = msgpack.packb([msgpack.ExtType(TUPLE, body)])
    return bytes(body)


@pytest.mark.parametrize("depth", [17, 220, 5000])
def test_objects_within_each_other_are_bounded(depth: int) -> None:
    """msgpack itself would use up the stack, which ends the process."""
    with pytest.raises(MalformedMessageError, match="more than 16 objects within each other"):
        read_bytes(nested(depth))


@pytest.mark.parametrize(
    "body",
    [
        msgpack.packb(msgpack.ExtType(120, msgpack.packb([]))),
        b"\xd4\xfb\0",
        msgpack.packb([1, 2]),
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb(msgpack.ExtType(INTEGER, b"9" * 100_000)),
    ],
    ids=["an unknown kind", "a negative kind", "a list", "lists within lists", "four billion items", "a huge number"],
)
def test_a_message_of_another_kind_is_not_read(body: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        read_bytes(body)


WRONG: Any = ["of another type"]


@pytest.mark.parametrize(
    "message",
    [
        Close(WRONG),
        Result(1, ItemTrace([WRONG])),
        Result(1, PlaceholderRange(0, 1, (WRONG,))),
        Result(1, RequestContext("id", WRONG, "")),
        Result(1, ItemInfo("image", EXPANSION, 0, False, {"image_grid_thw": WRONG})),
        Failed(1, WRONG),
        Pending(1, WRONG),
        Ask(WRONG, True, WRONG),
    ],
    ids=repr,
)
def test_a_field_of_another_type_is_refused_before_it_does_harm(message: Any) -> None:
    with pytest.raises(MalformedMessageError, match="TypeError"):
        sent(message)


def test_no_array_holds_objects() -> None:
    array = msgpack.packb(["|O", [1], b"\0" * 8])
    body = msgpack.packb(msgpack.ExtType(ARRAY, array))
    with pytest.raises(MalformedMessageError, match="ValueError"):
        read_bytes(body)


def test_a_field_s_type_may_be_an_alias() -> None:
    """As `numpy.typing.NDArray` is from numpy 2.5 on."""
    value = TypeVar("value")
    alias = TypeAliasType("alias", np.ndarray[Any, np.dtype[value]], type_params=(value,))
    is_array = codec._type_check(alias[np.int32])
    assert is_array(np.zeros(2, np.int32))
    assert not is_array([0, 0])
