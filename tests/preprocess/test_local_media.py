"""Files below one folder, and the many ways to ask for another one."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylens.preprocess import local_media
from raylens.preprocess.local_media import LocalMedia
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.schema import InvalidRequestError

LIMITS = MediaLimits(max_item_bytes=1000)
DISABLED, FORBIDDEN, INVALID, FAILED = (
    *("media_local_disabled", "media_url_forbidden", "invalid_media_url", "media_fetch_failed"),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """<tmp>/media is the root; beside it lie a secret and a folder whose name begins alike."""
    folder = tmp_path / "media"
    (folder / "cats").mkdir(parents=True)
    (folder / "cats" / "tom.png").write_bytes(b"tom")
    (folder / "a b%#?é.png").write_bytes(b"odd")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-secret").mkdir()
    (tmp_path / "media-secret" / "key").write_bytes(b"secret")
    return folder


async def read(root: Path | None, url: str) -> bytes:
    return await LocalMedia(root, LIMITS).read(url)


async def refusal(root: Path | None, url: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await read(root, url)
    assert caught.value.field == "media"
    assert root is None or str(root) not in caught.value.reason
    return caught.value.code


@pytest.mark.parametrize(
    "url",
    [
        "file://{root}/cats/tom.png",
        "file:{root}/cats/tom.png",
        "file://localhost{root}/cats/tom.png",
        "FILE://{root}/cats/tom.png",
        "file:cats/tom.png",
        "file:cats%2Ftom.png",
        "file:c%61ts/./../cats//tom.png",
    ],
)
async def test_files_below_the_root_are_read(root: Path, url: str) -> None:
    assert await read(root, url.format(root=root)) == b"tom"


async def test_names_are_decoded_once(root: Path) -> None:
    assert await read(root, "file:a%20b%25%23%3F%C3%A9.png") == b"odd"
    assert await read(root, "file:a b%25%23%3Fé.png") == b"odd"


async def test_without_a_root_nothing_is_read() -> None:
    assert await refusal(None, "file:///etc/passwd") == DISABLED


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("file:///etc/passwd", FORBIDDEN),
        ("file:../secret", FORBIDDEN),
        ("file:cats/../../secret", FORBIDDEN),
        ("file:%2e%2e/secret", FORBIDDEN),
        ("file:%2e%2e%2fsecret", FORBIDDEN),
        ("file:..%2Fmedia-secret/key", FORBIDDEN),
        ("file://{root}-secret/key", FORBIDDEN),
        ("file://{root}/../secret", FORBIDDEN),
        ("file://{root}/../absent", FORBIDDEN),  # as if it were there
        ("file://{root}", FORBIDDEN),
        ("file:.", FORBIDDEN),
        ("file:cats", FORBIDDEN),
        ("file:cats/", FORBIDDEN),
        ("file:%252e%252e/secret", FAILED),
        ("file:..\\secret", FAILED),
        ("file:absent.png", FAILED),
        ("file:cats/tom.png/more", FAILED),
        ("file:" + "x" * 5000, FAILED),
        ("file:cats/tom.png%00.jpg", INVALID),
        ("file:cats/tom.png\0", INVALID),
        ("file:", INVALID),
        ("file://", INVALID),
        ("file://cats/tom.png", INVALID),
        ("file://127.0.0.1{root}/cats/tom.png", INVALID),
        ("file:cats/tom.png?x", INVALID),
        ("file:cats/tom.png#x", INVALID),
        ("file:\ud800", INVALID),
        ("http://localhost{root}/cats/tom.png", INVALID),
        ("{root}/cats/tom.png", INVALID),
        ("", INVALID),
    ],
)
async def test_nothing_else_is_read(root: Path, url: str, code: str) -> None:
    assert await refusal(root, url.replace("{root}", str(root))) == code


async def test_links_lead_no_farther_than_the_root(root: Path, tmp_path: Path) -> None:
    (root / "inside").symlink_to(root / "cats")
    (root / "relative").symlink_to("cats/tom.png")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to("..")
    (root / "twice").symlink_to("out")
    (root / "loop").symlink_to("loop")
    assert await read(root, "file:inside/tom.png") == b"tom"
    assert await read(root, "file:relative") == b"tom"
    for url in ("file:out", "file:up/secret", "file:twice", "file:inside/../../secret"):
        assert await refusal(root, url) == FORBIDDEN
    assert await refusal(root, "file:loop") == FORBIDDEN


async def test_the_root_may_be_a_link_itself(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    assert await read(link, "file:cats/tom.png") == b"tom"
    assert await read(link, f"file://{link}/cats/tom.png") == b"tom"


@pytest.mark.parametrize("replaced", ["tom.png", "cats"])
async def test_a_link_that_appears_after_the_check_is_not_followed(
    root: Path, tmp_path: Path, replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "tom.png").write_bytes(b"secret")
    opened = local_media._opened

    def replace_then_open(*arguments: list[bytes] | bytes) -> object:
        (root / "cats").rename(root / "old")
        if replaced == "cats":
            (root / "cats").symlink_to(tmp_path / "outside")
        else:
            (root / "cats").mkdir()
            (root / "cats" / "tom.png").symlink_to(tmp_path / "secret")
        return opened(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(local_media, "_opened", replace_then_open)
    assert await refusal(root, "file:cats/tom.png") in (FAILED, FORBIDDEN)


@pytest.fixture
def special(root: Path) -> Iterator[Path]:
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.getcwd()
        os.chdir(root)  # a socket's path may not be long
        listener.bind("socket")
        os.chdir(folder)
        yield root


@pytest.mark.parametrize("name", ["fifo", "socket"])
async def test_only_regular_files_are_read(special: Path, name: str) -> None:
    async with asyncio.timeout(5):
        assert await refusal(special, f"file:{name}") == FORBIDDEN


@pytest.mark.parametrize("path", ["null", "zero", "tty", "random"])
async def test_devices_are_not_read(path: str) -> None:
    assert await refusal(Path("/dev"), f"file:{path}") in (FORBIDDEN, FAILED)


async def test_a_file_that_turns_into_a_fifo_is_not_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regular = os.stat(root / "cats" / "tom.png")
    (root / "cats" / "tom.png").unlink()
    os.mkfifo(root / "cats" / "tom.png")
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    async with asyncio.timeout(5):
        assert await refusal(root, "file:cats/tom.png") == FORBIDDEN


async def test_sizes_are_limited(root: Path) -> None:
    (root / "full").write_bytes(b"x" * 1000)
    (root / "large").write_bytes(b"x" * 1001)
    (root / "empty").write_bytes(b"")
    with open(root / "sparse", "wb") as sparse:
        sparse.truncate(10**12)
    assert len(await read(root, "file:full")) == 1000
    for name in ("large", "sparse"):
        assert await refusal(root, f"file:{name}") == "media_too_large"
    assert await refusal(root, "file:empty") == "empty_media"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
async def test_files_that_tell_no_size_are_limited_as_they_are_read() -> None:
    assert os.stat("/proc/self/status").st_size == 0
    assert await refusal(Path("/proc"), f"file:{os.getpid()}/smaps") == "media_too_large"


async def test_files_that_may_not_be_read_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(root))

    media = LocalMedia(root, LIMITS)
    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(InvalidRequestError, match="the file cannot be read") as caught:
        await media.read("file:cats/tom.png")
    assert caught.value.code == FAILED


async def test_reading_keeps_the_event_loop_free(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []
    monkeypatch.setattr(local_media, "check_size", lambda *_, **__: readers.append(threading.current_thread()))
    await read(root, "file:cats/tom.png")
    assert readers != [threading.main_thread()]


async def test_no_descriptor_stays_open(root: Path) -> None:
    os.mkfifo(root / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    media = LocalMedia(root, LIMITS)
    for url in ("file:cats/tom.png", "file:fifo", "file:absent", "file:cats/absent/x", "file:cats"):
        for _ in range(5):
            with contextlib.suppress(InvalidRequestError):
                await media.read(url)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_root_must_be_a_folder(root: Path) -> None:
    with pytest.raises(NotADirectoryError):
        LocalMedia(root / "cats" / "tom.png", LIMITS)
    with pytest.raises(FileNotFoundError):
        LocalMedia(root / "absent", LIMITS)
