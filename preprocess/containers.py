"""Opens files of videos and sounds, with the least trust in them.

Demuxers and decoders see the given bytes only. The formats exclude playlists and lists of files, and no protocol can
open references in a file. The memory of a file's tables is checked before a demuxer reads them."""

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import av
from av.container import InputContainer

from raylens.preprocess.schema import InvalidRequestError, invalid_media

_MAX_STREAMS = 32
# The mov demuxer allocates some 60 bytes for each sample of each track. A few bytes of the file can declare many.
_MAX_INDEX_ENTRIES = 5_000_000
_MP4_BOXES = frozenset(b"ftyp styp sidx moov moof mdat mfra free skip wide pnot uuid".split())
_EBML_MAGIC = bytes.fromhex("1a45dfa3")
_MATROSKA_SEGMENT = bytes.fromhex("18538067")
_TS_PACKET = 188  # bytes
_UNKNOWN_RIFF_BYTES = 0x7FFF_FF00


@dataclass(frozen=True, slots=True)
class MediaKind:
    """The formats and codecs of one kind of media. `name`: in errors and their codes. `formats` and `decoders`:
    FFmpeg's names. `for_people`: the formats in errors."""

    name: str
    formats: tuple[str, ...]
    for_people: str
    decoders: tuple[str, ...]

    @contextmanager
    def refusing(self, content: bytes) -> Iterator[None]:
        """Turns all errors of reading hostile bytes into an InvalidRequestError."""
        try:
            yield
        except InvalidRequestError:
            raise
        # PyAV raises its own errors, and OSError, ValueError, IndexError, UnicodeDecodeError, ... for hostile bytes.
        except Exception as error:
            reason = f"the {len(content)} bytes are not readable as {self.name} ({self.for_people}), or are damaged"
            raise self.invalid(reason) from error

    def checked_format(self, content: bytes) -> str:
        """Returns the only demuxer that may read the content, by its first bytes.

        Raises InvalidRequestError for anything but `formats`, for a truncated file, and for a file with tables out of
        proportion."""
        with self.refusing(content):
            file_format = _format_of(content)
            if file_format not in self.formats:
                raise self.invalid(f"the {len(content)} bytes are not {self.name} of a known format: {self.for_people}")
            if _is_cut_off(content, file_format):
                raise self.corrupt(f"is cut off: by what it declares it is longer than its {len(content)} bytes")
            if file_format == "mov":
                self._check_tables(content)
        return file_format

    def opened(self, content: bytes, file_format: str, **options: str) -> InputContainer:
        """Opens a file that `checked_format` has accepted. `options`: further ones of FFmpeg."""
        options |= {
            # These two also apply to nested content, such as the subtitles of an AVI: no playlists, and no protocol
            # that could open another file or address.
            "format_whitelist": ",".join(self.formats),
            "protocol_whitelist": "none",
            # Opening already decodes a little, to complete the header's data.
            "codec_whitelist": ",".join(self.decoders),
            "max_streams": str(_MAX_STREAMS),
        }
        # Titles and other texts in an unknown encoding do not make a file invalid.
        return av.open(io.BytesIO(content), mode="r", format=file_format, options=options, metadata_errors="replace")

    def check_decoder(self, name: str) -> None:
        if name not in self.decoders:
            raise self.invalid(f"the {self.name}'s codec, {name}, is not one of {', '.join(self.decoders)}")

    def invalid(self, reason: str) -> InvalidRequestError:
        return invalid_media(reason, f"invalid_{self.name}")

    def corrupt(self, what: str) -> InvalidRequestError:
        return invalid_media(f"the {self.name} {what}", f"corrupt_{self.name}")

    def _check_tables(self, content: bytes) -> None:
        """Raises InvalidRequestError for an MP4 file without a movie header, with a compressed one, or whose small
        tables expand to a huge index.

        `stsz` and `trun` declare samples without bytes of their own, and each edit of an `elst` multiplies the samples.
        The check searches the tables by name in all boxes but the media data, at any depth, because demuxers are
        lenient."""
        if not any(kind == b"moov" for kind, _, _ in _boxes(content)):
            raise self.invalid(f"the file has no movie header, it is no {self.name} or an incomplete one")
        num_samples, num_edits = 0, 1
        for kind, start, end in _boxes(content):
            if kind == b"mdat":
                continue
            if content.find(b"cmov", start, end) >= 0:
                raise self.invalid(f"the {self.name} has a compressed header, which is not read")
            for name, offset in ((b"stsz", 12), (b"stz2", 12), (b"trun", 8)):
                num_samples += sum(_numbers(content, name, offset, start, end))
            num_edits = max(num_edits, *_numbers(content, b"elst", 8, start, end), 1)
        if num_samples * num_edits > _MAX_INDEX_ENTRIES:
            reason = f"the {self.name} declares {num_samples} samples in {num_edits} edits"
            limit = f"the limit is {_MAX_INDEX_ENTRIES} in all"
            raise invalid_media(f"{reason}, {limit}", f"{self.name}_too_long")


def _format_of(content: bytes) -> str | None:
    """Returns FFmpeg's name of the format that the first bytes show."""
    if content.startswith(_EBML_MAGIC):
        return "matroska"
    if content.startswith(b"RIFF"):
        return {b"AVI ": "avi", b"WAVE": "wav"}.get(content[8:12])
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if content[4:8] in _MP4_BOXES:
        return "mov"
    if content.startswith(b"fLaC"):
        return "flac"
    if content.startswith(b"OggS"):
        return "ogg"
    if content.startswith(b"ID3"):
        return "mp3"
    if content[0] == 0xFF and content[1] & 0xE0 == 0xE0:  # the mark of a frame; AAC has no layer
        return "mp3" if content[1] & 0x06 else "aac"
    if content[: 3 * _TS_PACKET : _TS_PACKET] == b"GGG":  # each packet begins with the sync byte
        return "mpegts"
    return None


def _is_cut_off(content: bytes, file_format: str) -> bool:
    """Returns whether the file is cut off: it declares more bytes than it has, or is a GIF without its last byte.
    Decoders accept a truncated file silently.

    MPEG-TS, MP3, AAC and live WebM declare no size, so they are never reported as cut off."""
    if file_format == "mov":
        return any(kind in _MP4_BOXES and end > len(content) for kind, _, end in _boxes(content))
    if file_format == "matroska":
        return (_segment_end(content) or 0) > len(content)
    if file_format in ("avi", "wav"):
        # Some writers include the 8 bytes of the header, and those that stream leave 0 or the largest number.
        return len(content) < int.from_bytes(content[4:8], "little") < _UNKNOWN_RIFF_BYTES
    if file_format == "ogg":
        return _is_ogg_cut_off(content)
    if file_format == "gif":
        return not content.rstrip(b"\0\r\n ").endswith(b";")
    return False


def _is_ogg_cut_off(content: bytes) -> bool:
    """Returns whether the last page lacks bytes: each page declares those of its segments."""
    at = content.rfind(b"OggS")
    lengths = content[at + 27 : at + 27 + content[at + 26]]
    return len(lengths) < content[at + 26] or at + 27 + len(lengths) + sum(lengths) > len(content)


def _boxes(content: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields the kind, start and end of each top-level box of an MP4 file. The last may end beyond the content."""
    start = 0
    while start + 8 <= len(content):
        size, kind, long_size = struct.unpack(">I4sQ", content[start : start + 16].ljust(16, b"\0"))
        size = {0: len(content) - start, 1: long_size}.get(size, size)
        if size < 8:
            return
        yield kind, start, start + size
        start += size


def _segment_end(content: bytes) -> int | None:
    """Returns the end of a Matroska file's segment, or None if the file does not declare it."""
    header_size, after = _ebml_size(content, at=4)
    segment = after + (header_size or 0)
    if content[segment : segment + 4] != _MATROSKA_SEGMENT:
        return None
    size, after = _ebml_size(content, at=segment + 4)
    return None if size is None else after + size


def _ebml_size(content: bytes, at: int) -> tuple[int | None, int]:
    """Returns the size at `at`, or None if unknown, and the position after it. A size has 1 to 8 bytes: one more than
    the leading zeros of its first byte. All ones mean unknown."""
    length = 9 - content[at].bit_length()
    mask = 2 ** (7 * length) - 1
    size = int.from_bytes(content[at : at + length], "big") & mask
    return (None if size == mask else size), at + length


def _numbers(content: bytes, name: bytes, offset: int, start: int, end: int) -> Iterator[int]:
    """Yields the 32-bit number `offset` bytes after the name of each box `name` in content[start:end]."""
    at = content.find(name, start, end)
    while at >= 0:
        # A size of 1 before the name: the actual size, of 8 bytes, follows the name.
        number = at + offset + (8 if content[at - 4 : at] == b"\0\0\0\1" else 0)
        yield int.from_bytes(content[number : number + 4], "big")
        at = content.find(name, at + 1, end)
