"""Resolves names to public addresses only.

The check is part of name resolution, so that the connection uses the checked address. This defeats DNS rebinding."""

import asyncio
import ipaddress
import re
import socket
from concurrent.futures import ThreadPoolExecutor

from aiohttp.abc import AbstractResolver, ResolveResult

_MAX_LOOKUPS = 64
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
# In addition to the exclusions of `is_global`, which differ between versions of Python.
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # IETF protocol assignments
        "192.88.99.0/24",  # relays of 6to4
        "168.63.129.16/32",  # Azure's internal services for its machines
        "2001::/23",  # IETF protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: any IPv4 address may be inside
        "3fff::/20",  # documentation
    )
]
# Resolvers may parse such a host as an IPv4 address, in different ways.
_ENDS_IN_A_NUMBER = re.compile(r"(?:^|\.)(?:\d+|0x[0-9a-f]*)\.?$", re.ASCII | re.IGNORECASE)


class ForbiddenAddressError(OSError):
    """A host name resolved to an address that is not public."""


def is_public_address(address: str) -> bool:
    """Returns whether `address` is a global unicast IP address. For mapped and NAT64 addresses, the embedded IPv4
    address decides; addresses of transition tunnels are never public. Raises ValueError if it is no address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.ipv4_mapped
        if embedded is None and ip not in _GLOBAL_UNICAST:
            return False
        ip = embedded or ip
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _NOT_PUBLIC)


def is_literal_address(host: str) -> bool:
    """Returns whether a URL's host, without brackets, is an IP address and not a name.

    Raises ValueError for an address in an ambiguous form: 127.1, 0177.0.0.1, 2130706433, or 127.0.0.1. with a dot at
    its end."""
    if ":" not in host and not _ENDS_IN_A_NUMBER.search(host):
        return False
    ipaddress.ip_address(host)
    return True


class SystemResolver(AbstractResolver):
    """The system's resolver, on threads of its own, so that slow lookups delay no other work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MAX_LOOKUPS, thread_name_prefix="lookup")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, 0, socket.AI_ADDRCONFIG
        )
        flags = socket.AI_NUMERICHOST
        return [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=kind, proto=protocol, flags=flags)
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class PublicResolver(AbstractResolver):
    """Returns the answers of another resolver. Raises ForbiddenAddressError unless every address is public."""

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        results = await self._resolver.resolve(host, port, family)
        if not all(is_public_address(result["host"]) for result in results):
            raise ForbiddenAddressError("the host's address is not public")
        return results

    async def close(self) -> None:
        await self._resolver.close()
