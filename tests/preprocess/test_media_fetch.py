"""Media by URL, against a real server on loopback: what is fetched, and what never is."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import quote

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import raylens
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.media_fetch import FetchPolicy, MediaFetcher
from raylens.preprocess.schema import InvalidRequestError

LIMITS = MediaLimits(max_item_bytes=1000)


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    async def answer(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/ok":
                return web.Response(body=b"picture")
            case "/big":
                return web.Response(body=b"x" * 1001)
            case "/agent":
                return web.Response(body=request.headers["User-Agent"].encode())
            case "/redirect":
                raise web.HTTPFound("/ok")
            case "/loop":
                raise web.HTTPFound("/loop")
            case "/to-file":
                return web.Response(status=302, headers={"Location": "file:///etc/passwd"})
            case "/endless":
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await response.write(b"x" * 100)
            case _:
                raise web.HTTPNotFound

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    running = TestServer(app)
    async with running:
        yield running


async def fetch(url: str, policy: FetchPolicy) -> bytes:
    async with MediaFetcher(LIMITS, policy) as fetcher:
        return await fetcher.fetch(url)


async def refusal(url: str, policy: FetchPolicy) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await fetch(url, policy)
    assert caught.value.field == "media"
    return caught.value.code


OPEN = FetchPolicy(allow_private_addresses=True, total_timeout_s=5)


@pytest.mark.parametrize("path", ["/ok", "/redirect"])
async def test_bodies_are_fetched(server: TestServer, path: str) -> None:
    assert await fetch(str(server.make_url(path)), OPEN) == b"picture"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/missing", "media_fetch_failed"),
        ("/loop", "media_fetch_failed"),
        ("/to-file", "invalid_media_url"),
        ("/big", "media_too_large"),
        ("/endless", "media_too_large"),
    ],
)
async def test_bad_answers_are_refused(server: TestServer, path: str, code: str) -> None:
    assert await refusal(str(server.make_url(path)), OPEN) == code


async def test_slow_servers_are_given_up(unused_tcp_port: int) -> None:
    async def never(request: web.Request) -> web.Response:
        import asyncio

        await asyncio.sleep(30)
        return web.Response()

    app = web.Application()
    app.router.add_get("/", never)
    async with TestServer(app, port=unused_tcp_port) as server:
        policy = FetchPolicy(allow_private_addresses=True, total_timeout_s=0.2)
        assert await refusal(str(server.make_url("/")), policy) == "media_fetch_failed"


async def test_loopback_is_not_reached_by_default(server: TestServer) -> None:
    assert await refusal(str(server.make_url("/ok")), FetchPolicy()) == "media_url_forbidden"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0.0.0.0", "2130706433", "0x7f.1", "017700000001", "[::1]", "[::ffff:127.0.0.1]"]
)
async def test_no_spelling_of_loopback_is_reached(server: TestServer, host: str) -> None:
    assert await refusal(f"http://{host}:{server.port}/ok", FetchPolicy()) in {
        "media_url_forbidden",
        "invalid_media_url",
    }


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://example.com/a", "//example.com/a", "nonsense", "http://"])
async def test_other_schemes_are_refused(url: str) -> None:
    assert await refusal(url, OPEN) == "invalid_media_url"


async def test_only_listed_domains_are_fetched(server: TestServer) -> None:
    policy = FetchPolicy(allow_private_addresses=True, allowed_domains=("example.com",))
    assert await refusal(str(server.make_url("/ok")), policy) == "media_url_forbidden"
    assert await refusal("http://notexample.com/", policy) == "media_url_forbidden"


async def test_fetching_can_be_switched_off(server: TestServer) -> None:
    policy = FetchPolicy(enabled=False, allow_private_addresses=True)
    assert await refusal(str(server.make_url("/ok")), policy) == "media_fetch_disabled"


async def test_a_media_host_is_told_who_asks(server: TestServer) -> None:
    version = raylens.__version__
    assert await fetch(str(server.make_url("/agent")), OPEN) == f"Raylens/{version}".encode()
    policy = replace(OPEN, contact="mailto:ops@example.com")
    assert await fetch(str(server.make_url("/agent")), policy) == f"Raylens/{version} (mailto:ops@example.com)".encode()
    for contact in ("", "a\nb", "é"):
        with pytest.raises(ValidationError):
            replace(OPEN, contact=contact)


PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
LETTERS = "".join(set(PRINTABLE) - set("\\#."))  # a fragment is not sent, and relative targets lose their dots
TARGETS = st.text(st.sampled_from(LETTERS + "%%%/?&= é"), max_size=30).filter(
    # What begins with a slash names a host in a Location. Blanks and a mark without a query may go at the end.
    lambda text: not (text.startswith("/") or text.endswith((" ", "?")))
)


@settings(max_examples=40, deadline=None)
@given(st.lists(TARGETS, min_size=1, max_size=5), st.sampled_from(["direct", "absolute", "relative"]))
@example([";", "a;", "a;b?c;"], "relative")
def test_a_target_is_sent_as_it_is_written_byte_for_byte(targets: list[str], way: str) -> None:
    """Hosts sign it. Only what may not stand in a request is escaped."""
    asked: list[str] = []

    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0].split(b" ")[1].decode("ascii"))
            if asked[-1] == "/redirect":
                writer.write(b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n" % location.encode())
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n")
            writer.write(b"Connection: close\r\n\r\n" + b"x" * (asked[-1] != "/redirect"))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with MediaFetcher(LIMITS, OPEN) as fetcher:
            for target in targets:
                location = f"/{target}" if way == "relative" else f"{origin}/{target}"
                await fetcher.fetch(location if way == "direct" else f"{origin}/redirect")
                assert asked[-1] == "/" + quote(target, safe=PRINTABLE)
        server.close()

    asyncio.run(run())
