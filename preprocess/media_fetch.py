"""Fetches media from http(s) URLs without giving clients access to the server's own network (SSRF).

The resolver of each connection checks its addresses, which defeats DNS rebinding. Each target of a redirect is checked,
too. The size limit is checked while the body streams in."""

import asyncio
import re
from urllib.parse import quote

import aiohttp
from aiohttp.abc import AbstractResolver
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from yarl import URL

import raylens
from raylens.preprocess.media import MediaLimits, check_size, too_large
from raylens.preprocess.public_addresses import (
    ForbiddenAddressError,
    PublicResolver,
    SystemResolver,
    is_literal_address,
    is_public_address,
)
from raylens.preprocess.schema import InvalidRequestError, invalid_media

_REDIRECTS = {301, 302, 303, 307, 308}
_MAX_REDIRECTS = 3
_CONNECT_SECONDS = 5.0
"""A host that does not answer a connection in this time leaves the rest of `total_timeout_s` to its other addresses."""
_CHUNK_BYTES = 64 * 1024
_MAX_CONNECTIONS = 256
_MAX_CONNECTIONS_PER_HOST = 32  # a slow host leaves connections for other hosts
# URL parsers disagree about these characters: some drop them, some treat a backslash as a slash.
_AMBIGUOUS = re.compile(r"[\x00-\x1f\x7f\\]")
_PATH_AND_QUERY = re.compile(r"[^:/?#]+://[^/?#]*([^?#]*)(?:\?([^#]*))?")
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class FetchPolicy:
    """The http(s) URLs that the server fetches for its clients, and the timeouts."""

    enabled: bool = Field(default=True, description="fetch URLs at all")
    allowed_domains: tuple[str, ...] = Field(
        default=(), description="hosts that media may come from; empty: any public one"
    )
    allow_private_addresses: bool = Field(default=False, description="also fetch from addresses that are not public")
    contact: str | None = Field(
        default=None, pattern=r"^[ -~]+$", description="address of the operator, told to media hosts in User-Agent"
    )
    total_timeout_s: float = Field(default=20.0, gt=0, description="seconds for one fetch in all, with its redirects")


class MediaFetcher:
    """Fetches the media of all requests in one HTTP session. Use it as an async context manager or `close` it."""

    def __init__(self, limits: MediaLimits, policy: FetchPolicy, resolver: AbstractResolver | None = None) -> None:
        """`resolver`: replaces the system's resolver. Its answers are checked, too."""
        self._limits = limits
        self._policy = policy
        contact = f" ({policy.contact})" if policy.contact else ""
        self._headers = {
            # A compressed body could expand far beyond the size limit.
            "Accept-Encoding": "identity",
            # Some hosts reject clients without a name or a contact address.
            "User-Agent": f"Raylens/{raylens.__version__}{contact}",
        }
        self._domains = tuple(
            URL.build(scheme="https", host=domain).raw_host or "" for domain in policy.allowed_domains
        )
        self._resolver = resolver or SystemResolver()
        self._session = aiohttp.ClientSession(
            # No DNS cache: the connection must use the checked address.
            connector=aiohttp.TCPConnector(
                resolver=self._resolver if policy.allow_private_addresses else PublicResolver(self._resolver),
                use_dns_cache=False,
                limit=_MAX_CONNECTIONS,
                limit_per_host=_MAX_CONNECTIONS_PER_HOST,
            ),
            # Not `connect`, which also counts the wait for a free connection. `fetch` bounds the total time, of all
            # redirects together.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            # Cookies must not pass from one client's fetch to another's.
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
        )

    async def __aenter__(self) -> "MediaFetcher":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()
        await self._resolver.close()  # the session does not close it

    async def fetch(self, url: str) -> bytes:
        """Returns the body at `url`. Raises InvalidRequestError if it may not or cannot be fetched."""
        if not self._policy.enabled:
            reason = "fetching media by URL is switched off on this server, send a data: URL"
            raise invalid_media(reason, "media_fetch_disabled")
        try:
            async with asyncio.timeout(self._policy.total_timeout_s):
                return await self._fetch_following(url)
        except InvalidRequestError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _fetch_error(error) from error

    async def _fetch_following(self, url: str) -> bytes:
        target = self._checked(_parsed(_unambiguous(url)))
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._session.get(target, allow_redirects=False, headers=self._headers) as response:
                location = response.headers.get("Location")
                if response.status in _REDIRECTS and location:
                    target = self._checked(_parsed(_unambiguous(location), base=target))
                    continue
                if response.status != 200:
                    raise invalid_media(f"the media server answered {response.status}", "media_fetch_failed")
                return await self._read(response)
        raise invalid_media(f"more than {_MAX_REDIRECTS} redirects", "media_fetch_failed")

    def _checked(self, url: URL) -> URL:
        """Returns `url` itself, for the fetch. Raises InvalidRequestError if it may not be fetched, and ValueError if
        its host is spelled ambiguously."""
        host = url.raw_host
        if url.scheme not in ("http", "https") or not host:
            raise invalid_media("media URLs start with https://, http:// or data:", "invalid_media_url")
        if url.raw_user is not None or url.raw_password is not None:
            raise invalid_media("media URLs with a user name or password are not fetched", "invalid_media_url")
        if self._domains and not any(host == domain or host.endswith("." + domain) for domain in self._domains):
            raise invalid_media("the host is not on this server's list of media hosts", "media_url_forbidden")
        # A literal address is never resolved, so the resolver cannot check it.
        if is_literal_address(host) and not self._policy.allow_private_addresses and not is_public_address(host):
            raise _forbidden()
        return url

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if response.content_length is not None and response.content_length > self._limits.max_item_bytes:
            raise too_large(response.content_length, limits=self._limits)
        content = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            content += chunk
            if len(content) > self._limits.max_item_bytes:
                raise too_large(len(content), limits=self._limits)
        check_size(content, limits=self._limits)
        return bytes(content)


def _unambiguous(url: str) -> str:
    """Returns `url`. Raises ValueError for characters that parsers disagree about."""
    if _AMBIGUOUS.search(url):
        raise ValueError("control characters or backslashes in a URL")
    return url


def _parsed(url: str, base: URL | None = None) -> URL:
    """Returns the URL, which may be relative to `base`. Raises ValueError if it is malformed.

    Path and query stay the same byte for byte, because media hosts sign them. Only characters invalid in a request are
    escaped: spaces and non-ASCII characters."""
    if base is not None and not _PATH_AND_QUERY.match(url):
        url = str(base.join(URL(url, encoded=True)))
    parsed = URL(url)
    match = _PATH_AND_QUERY.match(url)
    if match is None or not parsed.raw_host:
        return parsed  # to be rejected
    path, query = (quote(part or "", safe=_PRINTABLE) for part in match.groups())
    return URL.build(
        scheme=parsed.scheme, authority=parsed.raw_authority, path=path or "/", query_string=query, encoded=True
    )


def _forbidden() -> InvalidRequestError:
    return invalid_media("the host's address is not public", "media_url_forbidden")


def _fetch_error(error: Exception) -> InvalidRequestError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ForbiddenAddressError):
            return _forbidden()
        cause = cause.__cause__ or cause.__context__
    # Errors of TLS certificates are ValueErrors, too.
    if isinstance(error, aiohttp.InvalidURL) or not isinstance(error, (aiohttp.ClientError, OSError)):
        return invalid_media("the media URL is malformed", "invalid_media_url")
    if isinstance(error, TimeoutError):
        reason = "the media server took too long"
    elif isinstance(error, aiohttp.ClientPayloadError):
        reason = "the media server's answer is cut off or malformed"
    else:
        reason = "the media server could not be reached"
    return invalid_media(reason, "media_fetch_failed")
