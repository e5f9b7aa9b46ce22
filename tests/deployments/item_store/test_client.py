"""This ingress' connection to a shard outlives whatever the shard says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raylens.deployments.item_store import client as shards_client
from raylens.deployments.item_store import shared_items
from raylens.deployments.item_store.client import OnPending, ShardConnection, ShardLostError, Shards
from raylens.deployments.item_store.codec import pack, read
from raylens.deployments.item_store.item_states import ContentMissingError, ItemOrder, ItemTrace, SharedItem
from raylens.deployments.item_store.messages import FROM_INGRESS, Ask, CallMethod, Made, Result
from raylens.deployments.item_store.shared_items import SharedItems
from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.request_context import NO_REQUEST
from raylens.deployments.wire.private_port import PortAddress, PrivatePort, Reader, Writer, frame
from raylens.preprocess.schema import ItemExpansion, ItemInfo, PlaceholderRange
from tests.waiting import until

INFO = ItemInfo("image", ItemExpansion(np.zeros(1, np.int32), PlaceholderRange(0, 1)), 10)
RUBBISH = {
    "not a message": frame(b"rubbish"),
    "a message of 4294967295 bytes": b"\xff\xff\xff\xff",
    "a CallMethod, which this end is not sent": pack(CallMethod(0, "file", [])),
}


ORDER = ItemOrder(NO_REQUEST, "r", "", "hash", "image", b"content", 1, 1, {}, False)
MADE = Made(0, SharedItem(INFO, PackedReference(b"id", b"owner", b"state")), ItemTrace())


class Shard:
    """Answers each call of its first connections with `rubbish`, of all others with the call's own arguments."""

    def __init__(self, rubbish: Sequence[bytes]) -> None:
        self._rubbish = list(rubbish)
        self.num_connections = 0
        self.port = PrivatePort(self._serve)

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        number, self.num_connections = self.num_connections, self.num_connections + 1
        while True:
            message = await read(reader, FROM_INGRESS)
            if isinstance(message, CallMethod | Ask):
                answer = MADE if isinstance(message, Ask) else Result(message.number, message.arguments)
                writer.write(self._rubbish[number] if number < len(self._rubbish) else pack(answer))


class Handle:
    """As much of a handle of Serve as is used."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    @property
    def address(self) -> "Handle":
        return self

    async def remote(self) -> PortAddress:
        return self._shard.port.address


@asynccontextmanager
async def connected(*rubbish: bytes) -> AsyncIterator[tuple[Shard, Shards]]:
    shard = Shard(rubbish)
    await shard.port.open()
    found = Shards([Handle(shard)])
    found.open()
    try:
        yield shard, found
    finally:
        await found.close()
        await shard.port.close()


async def ask(connection: ShardConnection, argument: Any, on_pending: OnPending = lambda pending: None) -> Any:
    with ExitStack() as pins:
        return await connection.ask(lambda number: CallMethod(number, "file", [argument]), pins, on_pending)


@pytest.mark.parametrize(("reason", "rubbish"), RUBBISH.items(), ids=RUBBISH)
async def test_a_shard_that_sends_rubbish_is_connected_again(
    rubbish: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(rubbish, rubbish) as (shard, found):
        for _ in range(2):
            with pytest.raises(ShardLostError):
                await asyncio.wait_for(ask(await found.nearest("key"), 1), 10)
        assert await asyncio.wait_for(ask(await found.nearest("key"), 2), 10) == [2]
        assert shard.num_connections == 3
    told = [one.message for one in caplog.records if "closed the connection to shard 0" in one.message]
    assert len(told) == 2, "one line for each connection"
    assert all(reason in line for line in told)


async def test_an_error_in_what_a_message_does_is_logged_and_ends_its_connection_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected(pack(Made(0, None, ItemTrace()))) as (_, found):  # of an item that was never pending
        with pytest.raises(ShardLostError):
            await asyncio.wait_for(ask(await found.nearest("key"), 1), 10)
        assert await asyncio.wait_for(ask(await found.nearest("key"), 2), 10) == [2]
    assert "never described" in caplog.text


async def test_an_order_is_sent_again_when_its_shard_is_lost() -> None:
    again: Any = SimpleNamespace(noted=[], inc=lambda **tags: again.noted.append(tags))
    async with connected(RUBBISH["not a message"]) as (shard, found):
        item, _ = await asyncio.wait_for(SharedItems(found, again).processed_of(ORDER), 10)
        assert shard.num_connections == 2
    assert item.ref.object_id == b"id"
    assert again.noted == [{"stage": "shared", "reason": "ShardLostError"}]


async def test_a_file_whose_copy_is_lost_is_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[bytes] = []

    async def stored(content: bytes) -> bytes:
        copies.append(content)
        return content

    monkeypatch.setattr(shared_items, "stored", stored)
    asked: list[bytes | PackedReference | None] = []

    async def ask(message: Any, *_: object) -> Any:
        asked.append(message(0).order.content)
        if len(asked) < 3:
            raise ContentMissingError
        return MADE.item, MADE.trace

    async def nearest(key: str) -> Any:
        return SimpleNamespace(ask=ask)

    nothing: Any = None
    shards: Any = SimpleNamespace(nearest=nearest)
    large = bytes(2**17)
    await SharedItems(shards, nothing).processed_of(replace(ORDER, content=large))
    assert asked == [None, large, large]
    assert len(copies) == 2


@pytest.mark.long
async def test_a_shard_that_sends_nothing_but_rubbish_is_not_asked_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards_client, "_PAUSE_SECONDS", 0.2)
    async with connected(*[RUBBISH["not a message"]] * 1000) as (shard, found):
        deadline = asyncio.get_running_loop().time() + 1
        while asyncio.get_running_loop().time() < deadline:
            with pytest.raises(ShardLostError):
                await ask(await found.nearest("key"), 1)
        assert 2 <= shard.num_connections <= 7
        await until(lambda: bool(found._connections))
