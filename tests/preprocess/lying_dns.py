"""A name server on loopback that answers what a test tells it to, and a client that asks it."""

import asyncio
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing

from aiohttp.abc import AbstractResolver, ResolveResult

_HEADER = struct.Struct(">6H")
_QUESTION = struct.Struct(">2H")
_ANSWER = struct.Struct(">3HIH")
_RECORD_TYPES = {1: socket.AF_INET, 28: socket.AF_INET6}  # A and AAAA
_ANSWER_FLAGS, _NAME_ERROR = 0x8180, 3
_POINTER_TO_QUESTION = 0xC00C


class LyingDns(asyncio.DatagramProtocol):
    """Answers each query for a name with the next of its lists of addresses, from then on with the last."""

    def __init__(self, names: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self.names = {name: [list(addresses) for addresses in turns] for name, turns in names.items()}
        self.queries: list[tuple[str, int]] = []
        """Name and record type of each query, in order."""
        self.delay_s = 0.0
        self._turns: dict[tuple[str, int], int] = {}

    async def start(self, port: int = 0) -> int:
        """Listens on loopback; returns the port."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, ("127.0.0.1", port))
        return int(self._transport.get_extra_info("sockname")[1])

    def stop(self) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        asyncio.get_running_loop().call_later(self.delay_s, lambda: self._transport.sendto(self._answer(data), addr))

    def _answer(self, query: bytes) -> bytes:
        identity, *_ = _HEADER.unpack_from(query)
        name, end = _read_name(query, _HEADER.size)
        (record_type, _) = _QUESTION.unpack_from(query, end)
        question = query[_HEADER.size : end + _QUESTION.size]
        self.queries.append((name, record_type))
        turns = self.names.get(name)
        if turns is None:
            return _HEADER.pack(identity, _ANSWER_FLAGS | _NAME_ERROR, 1, 0, 0, 0) + question
        turn = self._turns.get((name, record_type), 0)
        self._turns[name, record_type] = turn + 1
        family = _RECORD_TYPES.get(record_type)
        packed = [
            socket.inet_pton(family, address)
            for address in turns[min(turn, len(turns) - 1)]
            if family is not None and (":" in address) == (family == socket.AF_INET6)
        ]
        answers = [_ANSWER.pack(_POINTER_TO_QUESTION, record_type, 1, 0, len(address)) + address for address in packed]
        return _HEADER.pack(identity, _ANSWER_FLAGS, 1, len(answers), 0, 0) + question + b"".join(answers)


def _read_name(message: bytes, start: int) -> tuple[str, int]:
    """The name at `start` and where it ends."""
    labels, at = [], start
    while size := message[at]:
        labels.append(message[at + 1 : at + 1 + size].decode("ascii").lower())
        at += 1 + size
    return ".".join(labels), at + 1


class DnsClient(AbstractResolver):
    """Asks the name server at a port of loopback for A and AAAA records, as the system's resolver would."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        results = []
        for record_type, record_family in _RECORD_TYPES.items():
            for address in await self._ask(host, record_type):
                found = socket.inet_ntop(record_family, address)
                results.append(
                    ResolveResult(hostname=host, host=found, port=port, family=record_family, proto=0, flags=0)
                )
        if not results:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return results

    async def _ask(self, host: str, record_type: int) -> list[bytes]:
        labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in host.rstrip(".").split("."))
        question = labels + b"\0" + _QUESTION.pack(record_type, 1)
        loop = asyncio.get_running_loop()
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as client:
            client.setblocking(False)
            client.connect(("127.0.0.1", self._port))
            await loop.sock_sendall(client, _HEADER.pack(7, 0x0100, 1, 0, 0, 0) + question)
            answer = await loop.sock_recv(client, 4096)
        num_answers = _HEADER.unpack_from(answer)[3]
        at, addresses = _HEADER.size + len(question), []
        for _ in range(num_answers):
            *_, size = _ANSWER.unpack_from(answer, at)
            addresses.append(answer[at + _ANSWER.size : at + _ANSWER.size + size])
            at += _ANSWER.size + size
        return addresses

    async def close(self) -> None:
        pass
