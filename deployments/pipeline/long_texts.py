"""Separates pictures in base64 from the JSON of their body.

Parsing 90 MB of JSON at once copies all of it and blocks a replica's other clients for a tenth of a second. So this
module cuts stretches that look like base64 out of the body as it arrives, and leaves a mark in place of each. The JSON
parser then gets a small body. A mark stands inside the text of its stretch. Clients cannot guess a mark."""

import re
import secrets
from typing import Any

SLICE_BYTES = 2**15
"""A stretch consists of whole slices of this size. A shorter rest stays in the JSON."""

_MARKS = (b'"', b"\\", b",", b"[", b"{")
_NUMBER_DIGITS = 8  # hexadecimal, of a stretch in its mark
_LONGEST_ESCAPE = 5  # bytes of "\\uXXXX" behind its backslash
_BODIES_OF_MEDIA = frozenset(
    {"messages", "input", "prompt", "multi_modal_data"}
    | {"query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"}
)
_MEDIA_KEYS = frozenset(
    {"url", "image_url", "video_url", "audio_url", "image_embeds", "image", "video", "audio"}
    | {"data", "file_data", "file_url"}  # of input_audio and of documents
)
_PICTURE_IN_TEXT = re.compile(r'(<img src="data:[^"]*">)')


class LongTexts:
    """The long texts of one body. Call `take` for each chunk of the body and `rest` at the end. They return the body
    with marks, in order."""

    def __init__(self) -> None:
        self._nonce = "x" + secrets.token_hex(16)  # the letter makes it invalid JSON outside of a text
        self._stretches: list[list[bytes]] = []
        self._is_in_stretch = False
        self._has_begun_text = False  # no stretch begins before the first text
        self._pending = b""
        self._end = b""  # the last bytes that were returned as JSON

    def take(self, chunk: bytes) -> bytes:
        data = self._pending + chunk if self._pending else chunk
        num_whole = len(data) - len(data) % SLICE_BYTES
        self._pending = data[num_whole:]
        return b"".join([self._kept(data[at : at + SLICE_BYTES]) for at in range(0, num_whole, SLICE_BYTES)])

    def rest(self) -> bytes:
        pending, self._pending = self._pending, b""
        return pending

    def _kept(self, data: bytes) -> bytes:
        """Returns the JSON that stays of a slice: all of it, nothing, or the mark of a new stretch."""
        if not self._has_begun_text or not _is_like_base64(data) or (not self._is_in_stretch and b"\\" in self._end):
            self._is_in_stretch = False
            self._has_begun_text = self._has_begun_text or b'"' in data
            self._end = data[-_LONGEST_ESCAPE:]
            return data
        if self._is_in_stretch:
            self._stretches[-1].append(data)
            return b""
        self._is_in_stretch = True
        self._stretches.append([data])
        return f"{self._nonce}{len(self._stretches) - 1:0{_NUMBER_DIGITS}x}".encode()

    def restored(self, body: Any) -> Any:
        """Returns a parsed body with its texts restored. URLs of media keep their marks; `pieces` reads them."""
        if not self._stretches:
            return body
        if not isinstance(body, dict):
            return self._restored(body, keeps_media=False)
        return {
            self.text(key): self._restored(value, keeps_media=key in _BODIES_OF_MEDIA, key=key)
            for key, value in body.items()
        }

    def pieces(self, text: str) -> list[bytes]:
        """Returns `text`, with its marks replaced, as ASCII or UTF-8."""
        if not self._stretches or self._nonce not in text:
            return [text.encode()]
        first, *others = text.split(self._nonce)
        pieces = [first.encode()]
        for other in others:
            pieces += [*self._stretches[int(other[:_NUMBER_DIGITS], 16)], other[_NUMBER_DIGITS:].encode()]
        return pieces

    def text(self, marked: str) -> str:
        return b"".join(self.pieces(marked)).decode() if self._stretches and self._nonce in marked else marked

    def _restored(self, value: Any, *, keeps_media: bool, key: str = "") -> Any:
        if isinstance(value, str):
            if keeps_media and key in _MEDIA_KEYS:
                return value
            if keeps_media and key == "prompt":
                parts = _PICTURE_IN_TEXT.split(value)
                return "".join(part if index % 2 else self.text(part) for index, part in enumerate(parts))
            return self.text(value)
        if isinstance(value, list):
            return [self._restored(one, keeps_media=keeps_media, key=key) for one in value]
        if isinstance(value, dict):
            return {
                # The input of a tool call is no media, whatever its keys.
                self.text(name): self._restored(one, keeps_media=keeps_media and name != "input", key=name)
                for name, one in value.items()
            }
        return value


def _is_like_base64(data: bytes) -> bool:
    """Returns whether the data has no character that ends or escapes a text, or stands between values, in JSON."""
    return data.isascii() and not any(mark in data for mark in _MARKS) and not data.isspace()
