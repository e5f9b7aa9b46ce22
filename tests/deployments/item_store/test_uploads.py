"""Uploaded files: kept apart by tenant, within bounds, and gone in time."""

import asyncio
import gc
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from raylens.deployments.config import UploadConfig
from raylens.deployments.item_store.kept_files import FOLDER_VARIABLE
from raylens.deployments.item_store.uploads import Uploads
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.schema import InvalidRequestError
from tests.waiting import until


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def uploads(clock: Clock | None = None, **settings: Any) -> Uploads:
    return Uploads(UploadConfig(**settings), MediaLimits(max_item_bytes=100), clock or Clock())


def names(files: Uploads) -> set[str]:
    """Of the uploads in the folder."""
    return {path.stem for path in files._folder.iterdir()}


async def test_a_file_is_its_tenants_alone() -> None:
    files = uploads()
    kept = await files.add("alice", "a.png", "vision", b"content")
    assert await files.read("alice", kept.file_id) == b"content"
    assert await files.all("alice") == [kept]
    assert await files.all("bob") == []
    for act in (files.get, files.read, files.delete):
        with pytest.raises(InvalidRequestError, match="no file") as caught:
            await act("bob", kept.file_id)
        assert caught.value.status == 404
    await files.delete("alice", kept.file_id)
    with pytest.raises(InvalidRequestError, match="no file"):
        await files.read("alice", kept.file_id)


async def test_files_are_deleted_when_they_are_old() -> None:
    clock = Clock()
    files = uploads(clock, max_age_s=60, max_bytes=100)
    old = await files.add("alice", "old", "vision", b"x" * 60)
    clock.now += 61
    new = await files.add("bob", "new", "vision", b"x" * 60)
    assert await files.all("alice") == []
    assert names(files) == {new.file_id}
    assert old.expires_at == 1060


@pytest.mark.parametrize(
    ("settings", "content", "reason"),
    [
        ({"max_bytes": 50}, b"x" * 60, "60 bytes more than the 2 .* limit of 50"),
        ({}, b"x" * 101, "101 bytes or more, the limit is 100"),
        ({}, b"", "empty"),
    ],
)
async def test_there_is_room_for_so_much(settings: dict[str, Any], content: bytes, reason: str) -> None:
    files = uploads(**settings)
    await files.add("alice", "a", "vision", b"x")
    await files.add("bob", "b", "vision", b"x")
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        await files.add("alice", "c", "vision", content)
    assert caught.value.field == "file"
    assert len(await files.all("alice")) == 1


@pytest.mark.parametrize(
    ("bound", "most", "reason"),
    [
        ("_MAX_FILES_PER_KEY", 1, "1 files are kept for this API key, the limit is 1"),
        ("_MAX_FILES", 2, "2 files are kept, which is the limit"),
    ],
)
async def test_there_is_room_for_so_many(bound: str, most: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"raylens.deployments.item_store.uploads.{bound}", most)
    files = uploads()
    await files.add("alice", "a", "vision", b"x")
    await files.add("bob", "b", "vision", b"x")
    with pytest.raises(InvalidRequestError, match=reason):
        await files.add("alice", "c", "vision", b"x")
    assert len(await files.all("alice")) == 1


async def test_a_file_that_could_not_be_written_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    files = uploads(max_bytes=5)

    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            await files.add("alice", "a", "vision", b"12345")
    assert await files.all("alice") == []
    assert (await files.add("alice", "a", "vision", b"12345")).num_bytes == 5


async def test_a_file_deleted_while_it_is_read_is_not_found() -> None:
    files = uploads()
    kept = await files.add("alice", "a", "vision", b"x")
    (files._folder / kept.file_id).unlink()
    with pytest.raises(InvalidRequestError, match="no file"):
        await files.read("alice", kept.file_id)


async def test_who_leaves_while_a_file_is_written_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    files = uploads(max_bytes=10)
    is_writing, may_write = threading.Event(), threading.Event()
    write = Path.write_bytes

    def write_late(path: Path, content: bytes) -> int:
        is_writing.set()
        may_write.wait(10)
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_late)
    adding = asyncio.create_task(files.add("alice", "a.png", "vision", b"content"))
    await asyncio.to_thread(is_writing.wait, 10)
    assert await files.all("alice") == [], "nobody sees half of a file"
    adding.cancel()
    await asyncio.wait([adding])
    may_write.set()
    await until(lambda: not names(files))
    await asyncio.sleep(0.1)
    assert names(files) == set()
    assert (await files.add("alice", "b.png", "vision", b"x" * 10)).num_bytes == 10, "all room is free again"


async def test_a_client_may_shorten_how_long_a_file_is_kept() -> None:
    clock = Clock()
    files = uploads(clock, max_age_s=60)
    assert (await files.add("alice", "a", "vision", b"x", max_age_s=20)).expires_at == 1020
    assert (await files.add("alice", "b", "vision", b"x", max_age_s=1000)).expires_at == 1060


async def test_files_of_a_process_that_ended_are_there_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    before = uploads()
    kept = await before.add("alice", "a", "vision", b"x")
    gone = await before.add("alice", "b", "vision", b"y")
    half = await before.add("alice", "c", "vision", b"zz")
    await before.delete("alice", gone.file_id)
    (before._folder / half.file_id).write_bytes(b"z")
    (before._folder / "file-without-an-entry").write_bytes(b"x")
    (before._folder / "file-broken.json").write_bytes(b"{")
    after = uploads(max_bytes=4)
    assert await after.all("alice") == [kept]
    assert await after.read("alice", kept.file_id) == b"x"
    assert names(after) == {kept.file_id}
    with pytest.raises(InvalidRequestError, match="4 bytes more than the 1"):
        await after.add("bob", "d", "vision", b"1234")


async def test_only_this_user_may_look_into_the_folder(tmp_path: Path) -> None:
    files = uploads(folder=str(tmp_path / "of" / "uploads"))
    await files.add("alice", "a", "vision", b"x")
    assert stat.S_IMODE(files._folder.stat().st_mode) == 0o700
    assert files._folder.is_relative_to(tmp_path)


async def test_shards_have_a_folder_each_and_share_the_room(tmp_path: Path) -> None:
    config = UploadConfig(folder=str(tmp_path), max_bytes=10)
    shards = [Uploads(config, MediaLimits(), Clock(), shard=number, num_shards=2) for number in range(2)]
    assert shards[0]._folder != shards[1]._folder
    await shards[0].add("alice", "a", "vision", b"12345")
    with pytest.raises(InvalidRequestError, match="limit of 5"):
        await shards[0].add("alice", "a", "vision", b"1")


async def test_without_a_folder_nothing_outlives_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    files = uploads()
    folder = files._folder
    assert folder.exists()
    del files
    gc.collect()
    assert not folder.exists()
