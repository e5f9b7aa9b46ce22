"""Clients that try to reach the inside of the network, with a name server, web servers and sockets of our own.

127.0.0.1 plays a public host here and 127.0.0.2 one inside: only the judgement of those two is replaced. Against the
system's own resolver and true public addresses, see test_media_fetch_network.py.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler

from raylens.preprocess import media_fetch, public_addresses
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.media_fetch import FetchPolicy, MediaFetcher
from raylens.preprocess.schema import InvalidRequestError
from tests.preprocess.lying_dns import DnsClient, LyingDns

OUTSIDE, INSIDE = "127.0.0.1", "127.0.0.2"


@dataclass(slots=True)
class Network:
    """`requests` are the paths asked of either server; `fetch` asks the fetcher under attack."""

    fetcher: MediaFetcher
    dns: LyingDns
    port: int
    outside_requests: list[str]
    inside_requests: list[str]

    async def fetch(self, host: str, path: str = "/ok") -> bytes:
        return await self.fetcher.fetch(f"http://{host}:{self.port}{path}")

    async def refusal(self, url: str) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            await self.fetcher.fetch(url)
        assert caught.value.field == "media"
        assert self.inside_requests == []
        return caught.value.code

    def lie(self, host: str, *turns: Sequence[str]) -> str:
        """The URL of a host whose name has the addresses of each turn at a time."""
        self.dns.names[host] = [list(turn) for turn in turns]
        return f"http://{host}:{self.port}/ok"


async def answer(request: web.Request) -> web.StreamResponse:
    if request.path == "/to":
        return web.Response(status=302, headers={"Location": request.query["url"], "Connection": "close"})
    return web.Response(body=b"picture", headers={"Set-Cookie": "session=1", "Connection": "close"})


def listening(requests: list[str], cookies: list[str]) -> web.Application:
    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        requests.append(request.path)
        cookies.extend(request.cookies)
        return await handler(request)

    app = web.Application(middlewares=[note])
    app.router.add_get("/{path:.*}", answer)
    return app


@pytest.fixture
async def network(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    for module in (media_fetch, public_addresses):
        monkeypatch.setattr(module, "is_public_address", lambda address: address == OUTSIDE)
    outside: list[str] = []
    inside: list[str] = []
    cookies: list[str] = []
    dns = LyingDns({"good.test": [[OUTSIDE]], "inside.test": [[INSIDE]]})
    dns_port = await dns.start()
    async with (
        TestServer(listening(outside, cookies), host=OUTSIDE) as server,
        TestServer(listening(inside, cookies), host=INSIDE, port=server.port),
        MediaFetcher(MediaLimits(), FetchPolicy(total_timeout_s=5), DnsClient(dns_port)) as fetcher,
    ):
        assert server.port is not None
        yield Network(fetcher, dns, server.port, outside, inside)
    dns.stop()
    assert cookies == []


async def test_a_public_name_is_fetched(network: Network) -> None:
    assert await network.fetch("good.test") == b"picture"
    assert network.outside_requests == ["/ok"]


async def test_a_name_of_an_inside_address_is_refused(network: Network) -> None:
    assert await network.refusal(network.lie("inside.test", [INSIDE])) == "media_url_forbidden"


@pytest.mark.parametrize(
    "addresses", [[OUTSIDE, INSIDE], [INSIDE, OUTSIDE], [OUTSIDE, "::1"], [OUTSIDE, "::ffff:127.0.0.2"]]
)
async def test_one_inside_address_among_others_refuses_the_name(network: Network, addresses: list[str]) -> None:
    assert await network.refusal(network.lie("mixed.test", addresses)) == "media_url_forbidden"
    assert network.outside_requests == []


async def test_a_name_that_changes_its_answer_gains_nothing(network: Network) -> None:
    """One lookup for one connection: the answer that is checked is the one that is connected to."""
    url = network.lie("rebinding.test", [OUTSIDE], [INSIDE])
    assert await network.fetcher.fetch(url) == b"picture"
    assert len(network.dns.queries) == 2  # A and AAAA
    assert await network.refusal(url) == "media_url_forbidden"
    assert network.outside_requests == ["/ok"]


async def test_every_redirect_is_looked_up_and_checked_again(network: Network) -> None:
    network.lie("rebinding.test", [OUTSIDE], [INSIDE])
    url = f"http://rebinding.test:{network.port}/to?url=http://rebinding.test:{network.port}/ok"
    assert await network.refusal(url) == "media_url_forbidden"
    assert network.outside_requests == ["/to"]


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("http://127.0.0.2:{port}/ok", "media_url_forbidden"),
        ("//127.0.0.2:{port}/ok", "media_url_forbidden"),
        ("http://inside.test:{port}/ok", "media_url_forbidden"),
        ("http://169.254.169.254/latest/meta-data/", "media_url_forbidden"),
        ("http://[::1]:{port}/ok", "media_url_forbidden"),
        ("http://2130706434:{port}/ok", "invalid_media_url"),
        ("http://good.test@127.0.0.2:{port}/ok", "invalid_media_url"),
        ("http://user:secret@good.test:{port}/ok", "invalid_media_url"),
        ("file:///etc/passwd", "invalid_media_url"),
        ("gopher://127.0.0.2:{port}/_GET", "invalid_media_url"),
        ("data:image/png;base64,AAAA", "invalid_media_url"),
        ("http://\\\\127.0.0.2:{port}/ok", "invalid_media_url"),
        ("http://[::1", "invalid_media_url"),
    ],
)
async def test_redirects_lead_nowhere_inside(network: Network, target: str, code: str) -> None:
    location = target.format(port=network.port).replace("\\", "%5C")
    assert await network.refusal(f"http://good.test:{network.port}/to?url={location}") == code
    assert network.outside_requests == ["/to"]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        *(
            (f"http://{host}:{{port}}/ok", "media_url_forbidden")
            for host in (
                *("127.0.0.2", "127。0。0。2", "127.0.0｡2", "①②⑦.⓪.⓪.②", "１２７.０.０.２"),
                *("[::1]", "[::ffff:127.0.0.2]", "[::ffff:7f00:2]", "[0:0:0:0:0:ffff:7f00:2]", "[64:ff9b::7f00:2]"),
                *("[2002:7f00:2::]", "[2001:0:53aa:64c:0:7f8c:80ff:fffd]", "[fe80::1%25lo]", "[::1%25lo]"),
                *("inside.test", "INSIDE.test", "inside.test.", "ｉｎｓｉｄｅ.test", "inside。test"),
            )
        ),
        *(
            (f"http://{host}:{{port}}/ok", "invalid_media_url")
            for host in (
                *("2130706434", "0177.0.0.2", "0x7f.2", "0x7f000002", "127.2", "127.0.2", "127.0.0.2."),
                *("127.0.0.0x2", "127.0.0.02", "①②⑦.②", "00000177.2", "[127.0.0.2]"),
                *("good.test@127.0.0.2", "good.test:80@127.0.0.2", "user:secret@good.test", ":@127.0.0.2"),
                *("good.test\\@127.0.0.2", "127.0.0.2\\.good.test", "good.test\t@127.0.0.2", "127.0.0.2\n"),
                *("good.test\r\nHost: 127.0.0.2", "127.0.0.2\0.good.test", "", "[::1", "good.test:99999"),
            )
        ),
        ("http:/127.0.0.2:{port}/ok", "invalid_media_url"),
        ("http:127.0.0.2:{port}/ok", "invalid_media_url"),
        ("//127.0.0.2:{port}/ok", "invalid_media_url"),
        ("file:///etc/passwd", "invalid_media_url"),
        ("gopher://127.0.0.2:{port}/", "invalid_media_url"),
        ("unix:///var/run/docker.sock", "invalid_media_url"),
        ("http://127.0.0.2:{port}#@good.test/ok", "media_url_forbidden"),
        ("http://127.0.0.2:{port}?@good.test/ok", "media_url_forbidden"),
        ("https://127.0.0.2:{port}/ok", "media_url_forbidden"),
    ],
)
async def test_no_spelling_leads_inside(network: Network, url: str, code: str) -> None:
    assert await network.refusal(url.replace("{port}", str(network.port))) == code
    assert network.outside_requests == []


@pytest.mark.parametrize("tail", ["#@127.0.0.2/", "?x=@127.0.0.2", "/@127.0.0.2", "/?url=http://127.0.0.2/"])
async def test_what_follows_the_host_is_not_the_host(network: Network, tail: str) -> None:
    assert await network.fetcher.fetch(f"http://good.test:{network.port}{tail}") == b"picture"
    assert (len(network.outside_requests), network.inside_requests) == (1, [])


async def test_proxies_of_the_environment_are_not_asked(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve names itself, behind the check."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{INSIDE}:{network.port}")
    assert await network.fetch("good.test") == b"picture"
    assert network.inside_requests == []


async def test_cookies_are_neither_kept_nor_sent(network: Network) -> None:
    """The fixture looks at what the servers were sent."""
    for _ in range(2):
        assert await network.fetch("good.test") == b"picture"
    assert network.outside_requests == ["/ok", "/ok"]


@pytest.mark.parametrize(
    ("domain", "host", "allowed"),
    [
        ("good.test", "good.test", True),
        ("good.test", "GOOD.test", True),
        ("Good.Test", "good.test", True),
        ("test", "good.test", True),
        ("bücher.test", "xn--bcher-kva.test", True),
        ("xn--bcher-kva.test", "bücher.test", True),
        ("good.test", "notgood.test", False),
        ("good.test", "good.test.evil.test", False),
        ("good.test", "evil.test#good.test", False),
        ("good.test", "evil.test?.good.test", False),
    ],
)
async def test_listed_domains_are_compared_as_they_are_looked_up(
    network: Network, domain: str, host: str, allowed: bool
) -> None:
    network.dns.names |= {"xn--bcher-kva.test": [[OUTSIDE]]}
    policy = FetchPolicy(allowed_domains=(domain,), allow_private_addresses=True)
    async with MediaFetcher(MediaLimits(), policy, network.fetcher._resolver) as fetcher:
        if allowed:
            assert await fetcher.fetch(f"http://{host}:{network.port}/ok") == b"picture"
            return
        with pytest.raises(InvalidRequestError) as caught:
            await fetcher.fetch(f"http://{host}/")
        assert caught.value.code == "media_url_forbidden"
    assert network.dns.queries == []
