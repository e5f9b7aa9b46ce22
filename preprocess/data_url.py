"""`data:` URLs: media in base64 inside a request, as one text or in pieces as received."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from urllib.parse import unquote_to_bytes

import pybase64

from raylens.preprocess.media import MediaLimits, check_size, too_large
from raylens.preprocess.schema import InvalidRequestError, invalid_media

_SCHEME = "data:"
_MAX_HEADER_BYTES = 1024
_BLANKS = b" \t\r\n"
_STANDARD = bytes.maketrans(b"-_", b"+/")
_INLINE_BYTES = 2**18  # decoding this much takes a tenth of a millisecond, as long as handing it to a thread
_THREAD = ThreadPoolExecutor(1, "data-url")
"""Decodes all long URLs, one after another: more threads are no faster and delay the event loop."""


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{pybase64.b64encode(content).decode()}"


def is_data_url(url: str) -> bool:
    return url[: len(_SCHEME)].lower() == _SCHEME


@dataclass(frozen=True, slots=True)
class DataUrl:
    """A `data:` URL. `pieces` are its whole text, in order, as ASCII or UTF-8.

    As in browsers, the base64 may have line breaks (the program `base64` writes them), percent-encoded characters such
    as `%2B`, and no padding. The URL-safe alphabet is accepted, too."""

    pieces: Sequence[bytes]

    @property
    def num_bytes(self) -> int:
        """The approximate number of bytes of the content."""
        return sum(map(len, self.pieces)) * 3 // 4

    def head(self, num_bytes: int) -> bytes:
        """Returns about the first `num_bytes` bytes of the content, or none if the URL is malformed."""
        room = num_bytes * 4 // 3 + _MAX_HEADER_BYTES
        head = []
        for piece in self.pieces:
            head.append(piece[:room])
            room -= len(piece)
            if room < 0:
                break
        try:
            return b"".join(_decoded(_base64_pieces(head), is_whole=room >= 0))
        except ValueError:
            return b""

    async def decode(self, limits: MediaLimits) -> bytes:
        """Returns the content. Raises InvalidRequestError if it is malformed, empty or over `limits.max_item_bytes`."""
        if self.num_bytes < _INLINE_BYTES:
            return self._decode(limits)
        return await asyncio.get_running_loop().run_in_executor(_THREAD, self._decode, limits)

    def _decode(self, limits: MediaLimits) -> bytes:
        try:
            pieces = _base64_pieces(self.pieces)
            num_bytes = sum(map(len, pieces)) * 3 // 4
            if num_bytes > limits.max_item_bytes + 3:
                raise too_large(num_bytes, limits=limits)
            # Not `b"".join` at the end, which would hold the GIL while it copies all parts.
            content = BytesIO()
            content.writelines(_decoded(pieces))
        except InvalidRequestError:
            raise
        except ValueError as error:  # binascii.Error, too
            raise invalid_media("the data URL is not valid base64", "invalid_base64") from error
        check_size(content.getvalue(), limits=limits)
        return content.getvalue()


def _base64_pieces(pieces: Sequence[bytes]) -> list[bytes]:
    """Returns the text after the header, without whitespace and escapes. Raises InvalidRequestError for other URLs."""
    header, comma, first = pieces[0].partition(b",")
    if not comma or not header.lower().endswith(b";base64"):
        raise invalid_media("a data URL has the form data:image/png;base64,<data>", "invalid_data_url")
    found = [first, *pieces[1:]]
    if any(b"%" in piece for piece in found):
        found = [unquote_to_bytes(b"".join(found))]
    unusual = (b"\n", b" ", b"\r", b"\t", b"-", b"_")
    return [piece.translate(_STANDARD, _BLANKS) if any(one in piece for one in unusual) else piece for piece in found]


def _decoded(pieces: Sequence[bytes], *, is_whole: bool = True) -> Iterator[bytes]:
    """Yields each piece's part of the content. Without `is_whole`, drops the incomplete group of four characters at the
    end.

    Raises ValueError if the text is not valid base64."""
    rest = decoded = b""
    for number, piece in enumerate(pieces, start=1):
        text = rest + piece if rest else piece
        num_whole = len(text) if is_whole and number == len(pieces) else len(text) - len(text) % 4
        text, rest = text[:num_whole], text[num_whole:]
        if len(text) % 4 and not text.endswith(b"="):
            text += b"=" * (-len(text) % 4)
        if not text:
            continue
        if len(decoded) % 3:
            raise ValueError("something follows the padding")
        decoded = pybase64.b64decode(text, validate=True)
        yield decoded
