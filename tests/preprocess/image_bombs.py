"""Small picture files that ask for much, by name. Run as a program, decodes each in little memory and prints as JSON
what came of it and the seconds that it took."""

import json
import resource
import struct
import time
import zlib
from collections.abc import Callable

from PIL import Image
from PIL.JpegImagePlugin import MARKER

from raylens.preprocess.media import MediaLimits, decode_image
from raylens.preprocess.schema import InvalidRequestError
from tests.pictures import encoded

NUM_BYTES = 19 * 2**20
MEMORY_BYTES = 300 * 2**20
"""What decoding may take beside the program itself and the file."""

PICTURE = Image.new("RGB", (64, 64), "red")
PNG, JPEG, GIF, WEBP = (encoded(PICTURE, name) for name in ("PNG", "JPEG", "GIF", "WEBP"))
PNG_HEADER_END = 33
GIF_HEADER_END = 13 + (3 << (GIF[10] & 7) + 1)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def filled(part: bytes) -> bytes:
    return part * (NUM_BYTES // len(part))


def png(*chunks: bytes) -> bytes:
    return PNG[:PNG_HEADER_END] + b"".join(chunks) + PNG[PNG_HEADER_END:]


def png_behind(*chunks: bytes) -> bytes:
    return PNG[:-12] + b"".join(chunks) + PNG[-12:]


def png_of(width: int, height: int) -> bytes:
    return PNG[:8] + chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)) + PNG[PNG_HEADER_END:]


def jpeg(*segments: bytes) -> bytes:
    return JPEG[:2] + b"".join(segments) + JPEG[2:]


def segment(marker: int, data: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


# Begins with 0xffe3 and is as long: skipped as a whole by who takes that for a length.
SEGMENTS_OF_ONE_LENGTH = segment(0xE3, b"") * 16375 + segment(0xE3, b"xxx")


def gif(extensions: bytes) -> bytes:
    return GIF[:GIF_HEADER_END] + extensions + GIF[GIF_HEADER_END:]


def webp(*chunks: bytes, side: int = 64) -> bytes:
    header = b"VP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + (side - 1).to_bytes(3, "little") * 2
    body = b"WEBP" + header + b"ANIM" + struct.pack("<I", 6) + bytes(6) + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_frame() -> bytes:
    return b"ANMF" + struct.pack("<I", 16 + len(WEBP) - 12) + bytes(6) + b"\x3f\0\0" * 2 + b"\1\0\0\0" + WEBP[12:]


def jpeg_of(width: int, height: int) -> bytes:
    at = JPEG.index(b"\xff\xc0") + 5
    return JPEG[:at] + struct.pack(">HH", height, width) + JPEG[at + 4 :]


def bmp(size: int, compression: int, pixels: bytes) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, size, size, 1, 8, compression, 0, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(pixels), 0, 0, 1078) + header + bytes(1024) + pixels


def apng_frames() -> bytes:
    control = chunk(b"fcTL", struct.pack(">5I2H2B", 0, 64, 64, 0, 0, 1, 10, 0, 0))
    pixels = chunk(b"fdAT", b"\0\0\0\1" + zlib.compress(bytes(64 * 193)))
    start = chunk(b"acTL", struct.pack(">II", 9000, 0)) + control
    return PNG[:PNG_HEADER_END] + start + PNG[PNG_HEADER_END:-12] + (control + pixels) * 9000 + PNG[-12:]


def bomb(kind: bytes, prefix: bytes) -> bytes:
    """A chunk that unpacks to 100 MB."""
    return chunk(kind, prefix + zlib.compress(bytes(100 * 2**20), 9))


BOMBS: dict[str, Callable[[], bytes]] = {
    "png of 2^31 pixels a side": lambda: png_of(2**31 - 1, 2**31 - 1),
    "png just over the limit": lambda: png_of(7100, 7100),
    "jpeg of 65500 pixels a side": lambda: jpeg_of(65500, 65500),
    "gif of 65535 pixels a side": lambda: GIF[:6] + b"\xff\xff\xff\xff" + GIF[10:],
    "webp of 16000 pixels a side": lambda: webp(webp_frame(), side=16000),
    "bmp of 2^31 pixels a side": lambda: bmp(2**31 - 1, 0, b""),
    "bmp unpacked in Python": lambda: bmp(7000, 1, filled(b"\0\2\0\0")),
    "png of many chunks": lambda: png(filled(chunk(b"aaAa", b""))),
    "png of many chunks behind its pixels": lambda: png_behind(filled(chunk(b"aaAa", b""))),
    "png of many texts": lambda: png(filled(chunk(b"tEXt", b"k\0v"))),
    "png of many pixel chunks": lambda: png(filled(chunk(b"IDAT", b""))),
    "png of many colour profiles": lambda: png(chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(2**20 - 1), 9)) * 990),
    "png of a large colour profile": lambda: png(bomb(b"iCCP", b"k\0\0")),
    "png of a large text": lambda: png(bomb(b"zTXt", b"k\0\0")),
    "png of a large text in Unicode": lambda: png(bomb(b"iTXt", b"k\0\1\0\0\0")),
    "png of large texts": lambda: png(chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**20 - 1), 9)) * 990),
    "jpeg of many segments": lambda: jpeg(filled(segment(0xE3, b""))),
    "jpeg of many comments": lambda: jpeg(filled(segment(0xFE, b""))),
    "jpeg of metadata in pieces": lambda: jpeg(filled(segment(0xE1, b"Exif\0\0" + b"x" * 10))),
    "jpeg of padding": lambda: jpeg(b"\xff" * NUM_BYTES),
    "jpeg of junk": lambda: jpeg(b"\xff\xe3\0\2", bytes(NUM_BYTES)),
    **{
        f"jpeg of segments behind a marker {marker:x}": lambda marker=marker: jpeg(  # type: ignore[misc]
            filled(struct.pack(">H", marker) + SEGMENTS_OF_ONE_LENGTH)
        )
        for marker, (_, _, handler) in MARKER.items()
        if handler is None
    },
    "gif of many comments": lambda: gif(filled(b"!\xfe\1x\0")),
    "gif of many extensions": lambda: gif(filled(b"!\xf9\4\0\0\0\0\0")),
}
"""Each is to be refused."""

HARMLESS: dict[str, Callable[[], bytes]] = {
    "png whose pixels unpack to more": lambda: PNG[:PNG_HEADER_END] + bomb(b"IDAT", b"") + PNG[-12:],
    "apng of many frames": apng_frames,
    "gif of many frames": lambda: GIF[:-1] + filled(GIF[GIF_HEADER_END:-1]) + b";",
    "webp of many frames": lambda: webp(filled(webp_frame())),
    "jpeg of large metadata": lambda: jpeg(segment(0xE1, b"Exif\0\0" + bytes(60_000)) * 100),
    "gif of a large comment": lambda: gif(b"!\xfe" + (b"\xff" + b"x" * 255) * 20_000 + b"\0"),
}
"""Each is decoded, its first frame only."""


def main() -> None:
    decode_image(PNG, MediaLimits())
    found = {}
    for name, make in (BOMBS | HARMLESS).items():
        content = make()
        with open("/proc/self/statm") as status:
            in_use = int(status.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, resource.RLIM_INFINITY))
        started = time.process_time()
        try:
            outcome = str(decode_image(content, MediaLimits()).size)
        except InvalidRequestError as error:
            outcome = error.code
        found[name] = (outcome, time.process_time() - started)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
