"""Media from http(s) URLs, fetched so that no client can reach the inside of the network through the server.

Every address is checked where the connection is made (so a name that changes its answer gains nothing),
redirects are followed by hand and checked again, and the size limit holds while the body streams in.
"""

import ipaddress
import socket
from dataclasses import dataclass
from types import TracebackType

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from preprocess.media import MediaLimits, check_size, too_large
from preprocess.schema import InvalidRequestError

_REDIRECTS = {301, 302, 303, 307, 308}
_MAX_REDIRECTS = 3
_CHUNK_BYTES = 64 * 1024
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# A compressed body could grow without bound behind the size limit.
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "raylens"}


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Which URLs may be fetched: `allowed_domains` empty means any public host. Timeouts in seconds."""

    enabled: bool = True
    allowed_domains: tuple[str, ...] = ()
    allow_private_addresses: bool = False
    connect_timeout_s: float = 5.0
    total_timeout_s: float = 20.0


class ForbiddenAddressError(OSError):
    """A host name resolved to an address that is not public."""


class _PublicResolver(AbstractResolver):
    """Resolves names and refuses them unless every address is global unicast."""

    def __init__(self) -> None:
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        results = await self._resolver.resolve(host, port, family)
        for result in results:
            if not is_public_address(result["host"]):
                raise ForbiddenAddressError("the host's address is not public")
        return results

    async def close(self) -> None:
        await self._resolver.close()


def is_public_address(address: str) -> bool:
    """True for a global unicast IP address; an IPv4 address inside an IPv6 one is judged as itself."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = _embedded_ipv4(ip) or ip
    return ip.is_global and not ip.is_multicast


def _embedded_ipv4(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)


class MediaFetcher:
    """One HTTP session for the media of all requests; use as an async context manager or `close` it."""

    def __init__(self, limits: MediaLimits, policy: FetchPolicy) -> None:
        self._limits = limits
        self._policy = policy
        resolver: AbstractResolver = aiohttp.ThreadedResolver() if policy.allow_private_addresses else _PublicResolver()
        self._session = aiohttp.ClientSession(
            # No DNS cache: the check belongs to the very connection that is made.
            connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, limit=64),
            timeout=aiohttp.ClientTimeout(total=policy.total_timeout_s, connect=policy.connect_timeout_s),
            trust_env=False,
            auto_decompress=False,
        )

    async def __aenter__(self) -> "MediaFetcher":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def fetch(self, url: str) -> bytes:
        """Returns the body at `url`. Raises InvalidRequestError when it may not or cannot be fetched."""
        if not self._policy.enabled:
            raise InvalidRequestError(
                "fetching media by URL is switched off on this server, send a data: URL",
                field="media",
                code="media_fetch_disabled",
            )
        try:
            return await self._fetch_following(url)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise _fetch_error(error) from error

    async def _fetch_following(self, url: str) -> bytes:
        target = self._checked(URL(url))
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._session.get(target, allow_redirects=False, headers=_HEADERS) as response:
                location = response.headers.get("Location")
                if response.status in _REDIRECTS and location:
                    target = self._checked(target.join(URL(location)))
                    continue
                if response.status != 200:
                    raise InvalidRequestError(
                        f"the media server answered {response.status}",
                        field="media",
                        code="media_fetch_failed",
                    )
                return await self._read(response)
        raise InvalidRequestError(f"more than {_MAX_REDIRECTS} redirects", field="media", code="media_fetch_failed")

    def _checked(self, url: URL) -> URL:
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidRequestError(
                "media URLs start with https://, http:// or data:",
                field="media",
                code="invalid_media_url",
            )
        domains = self._policy.allowed_domains
        if domains and not any(url.host == domain or url.host.endswith("." + domain) for domain in domains):
            raise InvalidRequestError(
                "the host is not on this server's list of media hosts",
                field="media",
                code="media_url_forbidden",
            )
        if not self._policy.allow_private_addresses and _is_private_literal(url.host):
            raise _forbidden()
        return url

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            content += chunk
            if len(content) > self._limits.max_item_bytes:
                raise too_large(len(content), limits=self._limits)
        check_size(content, limits=self._limits)
        return bytes(content)


def _is_private_literal(host: str) -> bool:
    """True when `host` is an IP address, in any form that the system's resolver takes, and not a public one.

    aiohttp does not ask its resolver for literal addresses, so those are judged here.
    """
    try:
        return not is_public_address(host)
    except ValueError:
        pass
    try:
        return not is_public_address(socket.inet_ntoa(socket.inet_aton(host)))
    except OSError:
        return False


def _forbidden() -> InvalidRequestError:
    return InvalidRequestError("the host's address is not public", field="media", code="media_url_forbidden")


def _fetch_error(error: Exception) -> InvalidRequestError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ForbiddenAddressError):
            return _forbidden()
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, TimeoutError):
        reason = "the media server took too long"
    elif isinstance(error, ValueError):
        reason = "the media URL is malformed"
    else:
        reason = "the media server could not be reached"
    return InvalidRequestError(f"{reason}", field="media", code="media_fetch_failed")
