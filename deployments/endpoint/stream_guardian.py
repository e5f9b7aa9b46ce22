"""The process that ends the streams of an ingress that has died: a program of its own, of the standard library alone.

It holds a copy of the socket of each open stream, with the bytes that are to end it, so the connections outlive the
ingress. Its standard input is a socket to the ingress (`deployments/endpoint/guarded_streams.py`), of type SEQPACKET:

- `GUARD` + number + bytes, with the stream's socket: from now on the stream is held.
- `RELEASE` + number: the stream ends by itself.

When the ingress has gone, it sends each stream that it holds its last bytes, and ends."""

import fcntl
import signal
import socket
import struct
import sys
import termios

GUARD, RELEASE = b"G", b"R"
NUMBER_BYTES = 8
MAX_MESSAGE_BYTES = 4096
_MOST_UNSENT_BYTES = 16_384
"""A client that has so much before it is behind. The ingress may have died in the middle of a chunk to it, and bytes
behind half a chunk would be taken for its rest."""


def main() -> None:
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # they come to the ingress, too
        signal.signal(stop, signal.SIG_IGN)
    ingress = socket.socket(fileno=sys.stdin.fileno())
    held: dict[bytes, tuple[socket.socket, bytes]] = {}
    while message := _receive(ingress, held):
        kind, number = message[:1], message[1 : 1 + NUMBER_BYTES]
        if kind == RELEASE and number in held:
            held.pop(number)[0].close()
    for stream, last in held.values():
        _end(stream, last)


def _receive(ingress: socket.socket, held: dict[bytes, tuple[socket.socket, bytes]]) -> bytes:
    """Returns the next message, and takes in the stream that comes with it. Empty: the ingress has gone."""
    try:
        message, fds, _, _ = socket.recv_fds(ingress, MAX_MESSAGE_BYTES, 1)
    except ConnectionResetError:
        return b""
    if message[:1] == GUARD and fds:
        held[message[1 : 1 + NUMBER_BYTES]] = socket.socket(fileno=fds[0]), message[1 + NUMBER_BYTES :]
    return message


def _end(stream: socket.socket, last: bytes) -> None:
    try:
        unsent = struct.unpack("i", fcntl.ioctl(stream, termios.TIOCOUTQ, b"\0" * 4))[0]
        if unsent <= _MOST_UNSENT_BYTES:
            stream.setblocking(False)
            stream.send(last)
    except OSError:
        pass  # the client has gone, too
    finally:
        stream.close()


if __name__ == "__main__":
    main()
