"""Batches of one shard: each request has one answer, whatever ends in between."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from raylens.deployments.config import UploadConfig
from raylens.deployments.item_store import uploads as uploads_module
from raylens.deployments.item_store.batches import WINDOW_SECONDS, Batches
from raylens.deployments.item_store.uploads import Uploads
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.schema import InvalidRequestError
from tests.waiting import until

CHAT = "/v1/chat/completions"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Shard:
    """The uploads and batches of a shard that works in this folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = lambda: 1000.0, **settings: Any) -> None:
        config = UploadConfig(folder=str(folder), **settings)
        self.uploads = Uploads(config, MediaLimits(), clock)
        self.batches = Batches(config, self.uploads, clock)

    async def create(self, tenant: str = "alice", **fields: Any) -> str:
        """Returns the id of a batch."""
        file = await self.uploads.add(tenant, "in.jsonl", "batch", b"{}\n")
        wished = {"metadata": None, "output_max_age_s": None, **fields}
        batch_id: str = (await self.batches.create(tenant, file.file_id, CHAT, **wished))["id"]
        return batch_id

    async def add(self, batch_id: str, custom_id: str, *, is_error: bool = False, tenant: str = "alice") -> None:
        await self.batches.add(tenant, batch_id, custom_id, is_error, line(custom_id))

    async def ids_in(self, file_id: str) -> list[str]:
        content = await self.uploads.read("alice", file_id)
        return [json.loads(one)["custom_id"] for one in content.splitlines()]

    def growing(self, name: str) -> Path:
        """The file of answers that has this at the end of its name."""
        (path,) = self.uploads._folder.glob(f"*-{name}")
        return path


def line(custom_id: str) -> bytes:
    return json.dumps({"custom_id": custom_id}).encode() + b"\n"


async def test_the_last_answer_completes_a_batch(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    batch_id = await shard.create(metadata={"run": "7"})
    told = await shard.batches.describe("alice", batch_id)
    assert (told["status"], told["metadata"], told["expires_at"]) == ("validating", {"run": "7"}, 1000 + WINDOW_SECONDS)
    await shard.batches.begin("alice", batch_id, 3)
    await shard.add(batch_id, "a")
    await shard.add(batch_id, "b", is_error=True)
    told = await shard.batches.describe("alice", batch_id)
    assert (told["status"], told["request_counts"]) == ("in_progress", {"total": 3, "completed": 1, "failed": 1})
    assert (told["output_file_id"], [one.purpose for one in await shard.uploads.all("alice")]) == (None, ["batch"])
    await shard.add(batch_id, "c")
    told = await shard.batches.describe("alice", batch_id)
    assert (told["status"], told["completed_at"], told["finalizing_at"]) == ("completed", 1000, 1000)
    assert await shard.ids_in(told["output_file_id"]) == ["a", "c"]
    assert await shard.ids_in(told["error_file_id"]) == ["b"]


async def test_an_answer_counts_once(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    batch_id = await shard.create()
    await shard.batches.begin("alice", batch_id, 2)
    await asyncio.gather(*(shard.add(batch_id, "a", is_error=number % 2 == 1) for number in range(6)))
    await shard.add(batch_id, "b")
    await shard.add(batch_id, "late")
    told = await shard.batches.describe("alice", batch_id)
    assert told["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert await shard.ids_in(told["output_file_id"]) == ["a", "b"]
    assert told["error_file_id"] is None


async def test_an_answer_is_kept_whole_whose_ingress_is_lost_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(tmp_path)
    batch_id = await shard.create()
    await shard.batches.begin("alice", batch_id, 2)
    append, begun = Uploads.append, asyncio.Event()

    async def slow_append(*arguments: Any) -> None:
        await append(*arguments)
        begun.set()
        await asyncio.sleep(0.05)

    monkeypatch.setattr(Uploads, "append", slow_append)
    adding = asyncio.create_task(shard.add(batch_id, "a"))
    await begun.wait()
    adding.cancel()
    await shard.add(batch_id, "a")  # from the next ingress
    await shard.add(batch_id, "b")
    told = await shard.batches.describe("alice", batch_id)
    assert await shard.ids_in(told["output_file_id"]) == ["a", "b"]


async def test_a_killed_shard_finds_what_is_done_on_its_disk(tmp_path: Path) -> None:
    first = Shard(tmp_path)
    batch_id = await first.create()
    await first.batches.begin("alice", batch_id, 4)
    await first.add(batch_id, "a")
    await first.add(batch_id, "b", is_error=True)
    with first.growing("output").open("ab") as file:
        file.write(b'{"custom_id": "of a line that was cut')
    second = Shard(tmp_path)
    outline = json.loads(await second.batches.outline("alice", batch_id))
    assert (outline["endpoint"], sorted(outline["answered"])) == (CHAT, ["a", "b"])
    assert [one.purpose for one in await second.uploads.all("alice")] == ["batch"]
    told = await second.batches.describe("alice", batch_id)
    assert (told["status"], told["request_counts"]) == ("in_progress", {"total": 4, "completed": 1, "failed": 1})
    assert second.uploads.num_bytes == len(b"{}\n" + line("a") + line("b"))
    for custom_id in "abcd":
        await second.add(batch_id, custom_id)
    third = Shard(tmp_path)
    told = await third.batches.describe("alice", batch_id)
    assert (told["status"], told["request_counts"]) == ("completed", {"total": 4, "completed": 3, "failed": 1})
    assert await third.ids_in(told["output_file_id"]) == ["a", "c", "d"]


async def test_a_shard_that_is_killed_at_the_end_of_a_batch_ends_it_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(tmp_path)
    batch_id = await shard.create()
    await shard.batches.begin("alice", batch_id, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Uploads, "finish", AsyncMock())  # between the two writes
        await shard.add(batch_id, "a")
    again = Shard(tmp_path)
    told = await again.batches.describe("alice", batch_id)
    assert (told["status"], await again.ids_in(told["output_file_id"])) == ("completed", ["a"])


async def test_an_open_batch_goes_to_the_next_ingress_when_the_first_is_lost(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    asked = asyncio.create_task(shard.batches.next())
    batch_id = await shard.create()
    assert await asked == ["alice", batch_id]
    first = asyncio.create_task(shard.batches.hold("alice", batch_id))
    await asyncio.sleep(0)
    assert await shard.batches.hold("alice", batch_id) is False
    waiting = asyncio.create_task(shard.batches.next())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    first.cancel()
    assert await waiting == ["alice", batch_id]
    second = asyncio.create_task(shard.batches.hold("alice", batch_id))
    await asyncio.sleep(0)
    await shard.batches.cancel("alice", batch_id)
    assert await second is True
    assert await shard.batches.hold("alice", batch_id) is False


async def test_no_tenant_holds_up_the_batches_of_others(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    held = await shard.create("alice")
    holding = asyncio.create_task(shard.batches.hold("alice", held))
    await asyncio.sleep(0)
    for _ in range(3):
        await shard.create("alice")
    of_bob = await shard.create("bob")
    assert await shard.batches.next() == ["bob", of_bob]
    holding.cancel()


async def test_a_cancelled_batch_keeps_its_answers_and_takes_no_more(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    batch_id = await shard.create()
    await shard.batches.begin("alice", batch_id, 3)
    await shard.add(batch_id, "a")
    told = await shard.batches.cancel("alice", batch_id)
    assert (told["status"], told["cancelling_at"], told["cancelled_at"]) == ("cancelled", 1000, 1000)
    await shard.add(batch_id, "b")
    assert await shard.ids_in(told["output_file_id"]) == ["a"]
    assert (await shard.batches.cancel("alice", batch_id))["status"] == "cancelled"
    failed = await shard.create()
    await shard.batches.fail("alice", failed, [{"code": "x", "line": 1, "message": "m", "param": None}])
    with pytest.raises(InvalidRequestError, match="is failed, so it cannot be cancelled"):
        await shard.batches.cancel("alice", failed)
    assert (await shard.batches.describe("alice", failed))["errors"]["data"][0]["line"] == 1


async def test_a_batch_expires_and_is_forgotten(tmp_path: Path) -> None:
    clock = Clock()
    shard = Shard(tmp_path, clock, max_age_s=60)
    batch_id = await shard.create(output_max_age_s=20)
    await shard.batches.begin("alice", batch_id, 2)
    await shard.add(batch_id, "a")
    clock.now += WINDOW_SECONDS - 1
    assert (await shard.batches.describe("alice", batch_id))["status"] == "in_progress"
    holding = asyncio.create_task(shard.batches.hold("alice", batch_id))
    await asyncio.sleep(0)
    clock.now += 1
    both = await asyncio.gather(*(shard.batches.describe("alice", batch_id) for _ in range(2)))
    assert [one["status"] for one in both] == ["expired"] * 2
    assert await holding is True
    assert await shard.ids_in(both[0]["output_file_id"]) == ["a"]
    clock.now += 30
    with pytest.raises(InvalidRequestError, match="no file"):
        await shard.ids_in(both[0]["output_file_id"])
    clock.now += 31
    with pytest.raises(InvalidRequestError, match="no batch"):
        await shard.batches.describe("alice", batch_id)
    assert list(shard.batches._folder.iterdir()) == list(shard.uploads._folder.iterdir()) == []


async def test_a_batch_is_its_tenants_alone(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    batch_id = await shard.create("alice")
    for act in (shard.batches.describe, shard.batches.cancel, shard.batches.outline):
        with pytest.raises(InvalidRequestError, match="no batch") as caught:
            await act("bob", batch_id)
        assert (caught.value.status, caught.value.field) == (404, "batch_id")
    assert await shard.batches.describe_all("bob") == []
    assert await shard.batches.hold("bob", batch_id) is False
    file = await shard.uploads.add("alice", "a", "batch", b"{}")
    with pytest.raises(InvalidRequestError, match="input_file_id: no file"):
        await shard.batches.create("bob", file.file_id, CHAT, None, None)
    picture = await shard.uploads.add("alice", "a.png", "vision", b"content")
    with pytest.raises(InvalidRequestError, match="the purpose 'vision', a batch takes one of 'batch'"):
        await shard.batches.create("alice", picture.file_id, CHAT, None, None)


async def test_answers_count_into_the_bounds_of_files(tmp_path: Path) -> None:
    shard = Shard(tmp_path, max_bytes=3 + len(line("a")))
    batch_id = await shard.create()
    await shard.batches.begin("alice", batch_id, 2)
    await shard.add(batch_id, "a")
    with pytest.raises(InvalidRequestError, match="bytes more than") as caught:
        await shard.add(batch_id, "b")
    assert caught.value.code == "no_room"
    with pytest.raises(InvalidRequestError, match="bytes more than"):
        await shard.uploads.add("bob", "a", "vision", b"x")


async def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(tmp_path)
    batch_id = await shard.create()
    await shard.batches.begin("alice", batch_id, 2)
    await shard.add(batch_id, "a")
    before = shard.uploads.num_bytes

    def fail(file: Any, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(uploads_module, "append_line", fail)
        with pytest.raises(InvalidRequestError, match="No space left on device"):
            await shard.add(batch_id, "b")
    assert shard.uploads.num_bytes == before
    with monkeypatch.context() as patch:
        patch.setattr(Batches, "_note", lambda *_: fail(None, b""))
        await shard.add(batch_id, "b")
    assert shard.uploads.num_bytes == before + len(line("b"))
    for one in (shard, again := Shard(tmp_path)):
        if one is again:  # the end is not on its disk
            assert (await one.batches.describe("alice", batch_id))["status"] == "in_progress"
            await one.batches.begin("alice", batch_id, 2)
        told = await one.batches.describe("alice", batch_id)
        assert (told["status"], await one.ids_in(told["output_file_id"])) == ("completed", ["a", "b"])


async def test_batches_that_expire_together_all_do(tmp_path: Path) -> None:
    clock = Clock()
    shard = Shard(tmp_path, clock, max_age_s=60)
    ids = [await shard.create() for _ in range(3)]
    holding = [asyncio.create_task(shard.batches.hold("alice", one)) for one in ids]
    await asyncio.sleep(0)
    clock.now += WINDOW_SECONDS
    told = await asyncio.gather(*(shard.batches.describe("alice", one) for one in ids))
    assert [one["status"] for one in told] == ["expired"] * 3
    assert await asyncio.gather(*holding) == [True] * 3


@pytest.mark.parametrize(
    ("content", "reason", "code"),
    [
        (b" \n", "has no requests", "empty_batch"),
        (b"{}\n" * 4, "a batch of 4 lines, the limit is 3", "batch_too_large"),
        (b"x" * 21, "a batch of 21 bytes, the limit is 20", "batch_too_large"),
    ],
)
async def test_a_file_of_requests_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str, code: str
) -> None:
    monkeypatch.setattr(uploads_module, "_MAX_BATCH_LINES", 3)
    monkeypatch.setattr(uploads_module, "_MAX_BATCH_BYTES", 20)
    shard = Shard(tmp_path)
    with pytest.raises(InvalidRequestError, match=f"file: {reason}") as caught:
        await shard.uploads.add("alice", "a", "batch", content)
    assert caught.value.code == code
    await shard.uploads.add("alice", "a", "batch", b"{}\n{}\n{}")


async def test_a_key_has_a_bounded_number_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylens.deployments.item_store.batches._MAX_BATCHES_PER_KEY", 2)
    shard = Shard(tmp_path)
    for _ in range(2):
        await shard.create()
    with pytest.raises(InvalidRequestError, match="2 batches are kept for this API key, the limit is 2"):
        await shard.create()
    await shard.create("bob")
    await until(lambda: shard.batches.num_files == 3)
