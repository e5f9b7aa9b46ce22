"""A TCP relay on loopback that counts the bytes of its clients."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class CountingProxy:
    """`url`: where clients connect. `num_sent`: the bytes that came from them."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self.url = ""
        self.num_sent = 0

    async def serve(self, is_up: threading.Event) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._relay, "127.0.0.1")
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        is_up.set()
        await self._is_over.wait()
        server.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        await asyncio.gather(
            self._copy(reader, there_writer, counts=True), self._copy(there_reader, writer), return_exceptions=True
        )

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool = False) -> None:
        try:
            while chunk := await reader.read(2**16):
                self.num_sent += len(chunk) * counts
                writer.write(chunk)
                await writer.drain()
        finally:
            writer.close()


@contextmanager
def counting_proxy(target: str) -> Iterator[CountingProxy]:
    proxy, is_up = CountingProxy(target), threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(proxy.serve(is_up),))  # cancels what is still relayed
    thread.start()
    is_up.wait()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join()
