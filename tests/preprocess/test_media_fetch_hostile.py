"""Media servers that mean harm: slow, endless, lying, compressed. What they cost is bounded in time and in bytes."""

import asyncio
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count

import pytest

from raylens.preprocess.media import MediaLimits
from raylens.preprocess.media_fetch import FetchPolicy, MediaFetcher
from raylens.preprocess.schema import InvalidRequestError
from tests.preprocess.lying_dns import DnsClient, LyingDns
from tests.waiting import until

LIMIT = 100_000
LIMITS = MediaLimits(max_item_bytes=LIMIT)
OK = b"HTTP/1.1 200 OK\r\n"
PAUSE_S = 0.02
DEADLINE_S = 0.5

Script = Callable[["Sender"], Awaitable[None]]


class Sender:
    """A connection to the fetcher; counts what the fetcher takes."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.num_bytes = 0

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            self.num_bytes += len(piece)

    async def drip(self, content: bytes) -> None:
        for byte in content:
            await self.send(bytes([byte]))
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[str, list[Sender]]]:
    """A server that sends what `script` does, whatever it is asked: its URL and its connections so far."""
    senders: list[Sender] = []
    tasks: list[asyncio.Task[None] | None] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sender = Sender(writer)
        senders.append(sender)
        tasks.append(asyncio.current_task())
        try:
            await reader.readuntil(b"\r\n\r\n")
            await script(sender)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a task that ends otherwise is reported by asyncio
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1")
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", senders
    finally:
        server.close()
        for task in tasks:
            if task is not None:
                task.cancel()


def fetcher(total_timeout_s: float = DEADLINE_S, limits: MediaLimits = LIMITS) -> MediaFetcher:
    return MediaFetcher(limits, FetchPolicy(allow_private_addresses=True, total_timeout_s=total_timeout_s))


async def good(sender: Sender) -> None:
    await sender.send(OK, b"Connection: close\r\nContent-Length: 7\r\n\r\npicture")


async def nothing(sender: Sender) -> None:
    await asyncio.sleep(30)


async def dripping_headers(sender: Sender) -> None:
    await sender.drip(OK + b"X-Slow: " + b"x" * 10_000)


async def endless_header_lines(sender: Sender) -> None:
    await sender.send(OK)
    for number in count():
        await sender.drip(b"X-%d: x\r\n" % number)


async def dripping_body(sender: Sender) -> None:
    await sender.send(OK, b"Content-Length: 10000\r\n\r\n")
    await sender.drip(b"x" * 10_000)


async def dripping_chunks(sender: Sender) -> None:
    await sender.send(OK, b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        await sender.send(b"1\r\nx\r\n")
        await asyncio.sleep(PAUSE_S)


async def only_informational(sender: Sender) -> None:
    while True:
        await sender.send(b"HTTP/1.1 102 Processing\r\n\r\n")
        await asyncio.sleep(PAUSE_S)


async def slow_redirects(sender: Sender) -> None:
    await asyncio.sleep(0.8 * DEADLINE_S)
    await sender.send(b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize(
    "script",
    [
        *(nothing, dripping_headers, endless_header_lines, dripping_body, dripping_chunks, only_informational),
        slow_redirects,
    ],
    ids=lambda script: script.__name__,
)
async def test_the_deadline_holds_for_the_whole_fetch(script: Script) -> None:
    async with serving(script) as (url, _), fetcher() as media:
        started = time.perf_counter()
        with pytest.raises(InvalidRequestError, match="took too long") as caught:
            await media.fetch(url)
        assert caught.value.code == "media_fetch_failed"
        assert DEADLINE_S * 0.9 < time.perf_counter() - started < 2 * DEADLINE_S


async def endless_body(sender: Sender) -> None:
    await sender.send(OK, b"\r\n")
    while True:
        await sender.send(b"x" * 10_000)


async def endless_chunks(sender: Sender) -> None:
    await sender.send(OK, b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        await sender.send(b"2710\r\n", b"x" * 10_000, b"\r\n")


async def large_body_announced(sender: Sender) -> None:
    await sender.send(OK, b"Content-Length: 100000000\r\n\r\n")
    for _ in range(10_000):
        await sender.send(b"x" * 10_000)


async def one_large_chunk(sender: Sender) -> None:
    await sender.send(OK, b"Transfer-Encoding: chunked\r\n\r\n5F5E100\r\n")
    for _ in range(10_000):
        await sender.send(b"x" * 10_000)


async def endless_header(sender: Sender) -> None:
    await sender.send(OK, b"X-Long: ")
    while True:
        await sender.send(b"x" * 10_000)


async def endless_headers(sender: Sender) -> None:
    await sender.send(OK)
    for number in count():
        await sender.send(b"X-%d: %s\r\n" % (number, b"x" * 1000))


async def endless_chunk_extension(sender: Sender) -> None:
    await sender.send(OK, b"Transfer-Encoding: chunked\r\n\r\n1;")
    while True:
        await sender.send(b"x" * 10_000)


async def endless_trailers(sender: Sender) -> None:
    await sender.send(OK, b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
    for number in count():
        await sender.send(b"X-%d: %s\r\n" % (number, b"x" * 1000))


async def redirect_with_endless_body(sender: Sender) -> None:
    await sender.send(b"HTTP/1.1 302 Found\r\nLocation: /again\r\n\r\n")
    while True:
        await sender.send(b"x" * 10_000)


async def error_with_endless_body(sender: Sender) -> None:
    await sender.send(b"HTTP/1.1 500 Oops\r\n\r\n")
    while True:
        await sender.send(b"x" * 10_000)


@pytest.mark.parametrize(
    ("script", "codes"),
    [
        (endless_body, {"media_too_large"}),
        (endless_chunks, {"media_too_large"}),
        (large_body_announced, {"media_too_large"}),
        (one_large_chunk, {"media_too_large"}),
        (endless_header, {"media_fetch_failed"}),
        (endless_headers, {"media_fetch_failed"}),
        (endless_trailers, {"media_fetch_failed"}),
        (redirect_with_endless_body, {"media_fetch_failed"}),
        (error_with_endless_body, {"media_fetch_failed"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_no_more_is_taken_than_the_limit_and_buffers(script: Script, codes: set[str]) -> None:
    async with serving(script) as (url, senders), fetcher(total_timeout_s=2) as media:
        tracemalloc.start()
        with pytest.raises(InvalidRequestError) as caught:
            await media.fetch(url)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert caught.value.code in codes
    # What was sent beyond the limit lies mostly in the buffers of the two sockets.
    assert max(sender.num_bytes for sender in senders) < LIMIT + 12 * 2**20
    assert peak < 4 * LIMIT + 2**20


async def test_what_is_dropped_at_once_ends_by_the_deadline() -> None:
    """Extensions of a chunk are no content and are not kept, however many there are."""
    async with serving(endless_chunk_extension) as (url, _), fetcher() as media:
        tracemalloc.start()
        with pytest.raises(InvalidRequestError, match="took too long"):
            await media.fetch(url)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


async def test_an_announced_size_is_refused_before_the_body_comes() -> None:
    async def announced(sender: Sender) -> None:
        await sender.send(OK, b"Content-Length: 100001\r\n\r\n")
        await asyncio.sleep(30)

    async with serving(announced) as (url, _), fetcher(total_timeout_s=10) as media:
        started = time.perf_counter()
        with pytest.raises(InvalidRequestError, match="has 100001 bytes or more, the limit is 100000"):
            await media.fetch(url)
        assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    "answer",
    [
        b"Content-Length: 100\r\n\r\npicture",
        b"Transfer-Encoding: chunked\r\n\r\n64\r\npicture",
        b"Transfer-Encoding: chunked\r\n\r\n7\r\npicture\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\npicture\r\n0\r\n\r\n",
        b"Content-Length: 7\r\nContent-Length: 8\r\n\r\npicture",
        b"Content-Length: -7\r\n\r\npicture",
        b"Content-Length: 0\r\n\r\n",
        b"nonsense",
    ],
)
async def test_cut_off_and_malformed_answers_are_refused(answer: bytes) -> None:
    async with serving(lambda sender: sender.send(OK, answer)) as (url, _), fetcher(total_timeout_s=1) as media:
        with pytest.raises(InvalidRequestError) as caught:
            await media.fetch(url)
        assert caught.value.code in {"media_fetch_failed", "empty_media"}
        assert "took too long" not in caught.value.reason


@pytest.mark.parametrize(
    "answer", [b"", b"\0" * 100, b"HTTP/9.9 200 OK\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"220 smtp\r\n"]
)
async def test_other_protocols_are_refused(answer: bytes) -> None:
    async with serving(lambda sender: sender.send(answer)) as (url, _), fetcher(total_timeout_s=0.3) as media:
        addresses = (url, url.replace("http:", "https:"))
        for refusal in await asyncio.gather(*map(media.fetch, addresses), return_exceptions=True):
            assert isinstance(refusal, InvalidRequestError)
            assert refusal.code == "media_fetch_failed"


async def test_a_body_beyond_its_announced_size_is_not_taken() -> None:
    async def longer(sender: Sender) -> None:
        await sender.send(OK, b"Connection: close\r\nContent-Length: 7\r\n\r\npicture")
        await asyncio.sleep(PAUSE_S)
        await sender.send(b"x" * 1000)

    async with serving(longer) as (url, _), fetcher() as media:
        assert await media.fetch(url) == b"picture"


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip"])
async def test_compressed_bodies_stay_compressed(encoding: bytes) -> None:
    """Nobody asked for compression: what is sent is what counts, and a bomb of 10 MB remains its few kilobytes."""
    bomb = zlib.compress(bytes(10_000_000), 9)

    async def compressed(sender: Sender) -> None:
        await sender.send(OK, b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (encoding, len(bomb)), bomb)

    async with serving(compressed) as (url, _), fetcher() as media:
        assert await media.fetch(url) == bomb


async def test_slow_hosts_keep_nobody_else_waiting() -> None:
    """A client has hundreds of items at a host that never answers; another host's come at once meanwhile."""
    async with (
        serving(nothing) as (slow, senders),
        serving(good) as (quick, _),
        fetcher(total_timeout_s=30) as media,
    ):
        stuck = [asyncio.create_task(media.fetch(slow)) for _ in range(400)]
        await until(lambda: len(senders) == 32)
        assert await asyncio.gather(*(media.fetch(quick) for _ in range(20))) == [b"picture"] * 20
        assert len(senders) == 32
        assert not any(task.done() for task in stuck)
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)


async def test_names_that_are_slow_to_resolve_keep_nobody_else_waiting() -> None:
    dns = LyingDns({"slow.test": [["127.0.0.1"]]})
    dns.delay_s = 30
    resolver = DnsClient(await dns.start())
    policy = FetchPolicy(allow_private_addresses=True, total_timeout_s=DEADLINE_S)
    async with serving(good) as (quick, _), MediaFetcher(LIMITS, policy, resolver) as media:
        stuck = [asyncio.create_task(media.fetch("http://slow.test/")) for _ in range(10)]
        await asyncio.sleep(0)
        assert await media.fetch(quick) == b"picture"
        for task in stuck:
            with pytest.raises(InvalidRequestError, match="took too long"):
                await task
    dns.stop()


async def test_a_fetch_that_is_given_up_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def endless(sender: Sender) -> None:
        try:
            await sender.send(OK, b"\r\n")
            while True:
                await sender.drip(b"x")
        finally:
            closed.set()

    async with serving(endless) as (url, _), fetcher(total_timeout_s=30) as media:
        task = asyncio.create_task(media.fetch(url))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await closed.wait()
