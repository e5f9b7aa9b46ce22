"""What an ingress and a shard tell each other arrives as it was sent, and nothing else can."""

import asyncio
from dataclasses import fields, is_dataclass
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.shared.codec import pack, read
from deployments.shared.item_states import ContentMissingError, ItemOrder, PendingItem
from deployments.shared.messages import Ask, Call, Failed, Grant, Lack, Need, Pending, Remember, Result
from deployments.shared.stage_calls import PlugInFailedError, StageFailedError, StageUnavailableError
from deployments.shared.uploads import Upload
from deployments.shared.weight import Weight
from deployments.stages.private_port import frame
from preprocess.schema import InvalidRequestError, ItemExpansion, ItemInfo, PlaceholderRange, StageTime

NUMBERS = st.integers(0, 10**9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
WEIGHTS = st.builds(Weight, *[NUMBERS] * 4)
ORDERS = st.builds(
    ItemOrder,
    st.text(),
    st.text(),
    st.text(),
    st.sampled_from(["image", "video"]),
    st.none() | st.binary(),
    NUMBERS,
    NUMBERS,
    st.dictionaries(st.text(), JSON, max_size=3),
    st.booleans(),
)
UPLOADS = st.builds(Upload, st.text(), st.text(), st.text(), *[NUMBERS] * 3)
MESSAGES = st.one_of(
    st.builds(Ask, NUMBERS, st.booleans(), ORDERS),
    st.builds(Call, NUMBERS, st.text(), st.lists(JSON, max_size=3)),
    st.builds(Lack, NUMBERS, st.lists(st.builds(Need, st.text(), WEIGHTS, WEIGHTS), max_size=3)),
    st.builds(Grant, NUMBERS, st.dictionaries(st.text(), WEIGHTS, max_size=3)),
    st.builds(
        Result, NUMBERS, st.lists(st.builds(Upload, st.text(), st.text(), st.text(), *[NUMBERS] * 3), max_size=2)
    ),
)


def sent(message: Any) -> Any:
    async def arrived() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(pack(message))
        return await read(reader)

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


@given(MESSAGES)
def test_messages_arrive_as_they_were_sent(message: Any) -> None:
    assert sent(message) == message


@pytest.mark.parametrize("is_embed", [None, (True, False, True)])
def test_metadata_of_an_item_arrives_with_its_arrays(is_embed: tuple[bool, ...] | None) -> None:
    expansion = ItemExpansion(np.arange(3, dtype=np.int32), PlaceholderRange(0, 3, is_embed), "before", "after")
    inputs = {"image_grid_thw": np.array([[1, 2, 3]]), "scale": np.array(0.5, np.float32)}
    message = Pending(
        7, PendingItem(ItemInfo("image", expansion, 12, False, inputs, (StageTime("processor", 1.5, 0.5),)), None)
    )
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


def test_a_message_of_another_kind_is_not_read() -> None:
    async def arrived() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(msgpack.packb(msgpack.ExtType(120, b""))))
        await read(reader)

    with pytest.raises(IndexError):
        asyncio.run(arrived())
