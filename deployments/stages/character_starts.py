"""Finds the character of a text in which each token begins, also where a token holds a part of a character only."""

import codecs


class CharacterStarts:
    """Takes the bytes of one text part by part; `num_chars`: characters that are complete. Bytes that make up no
    character count as replacement characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_chars = 0

    def feed(self, content: bytes) -> tuple[int, str]:
        """The number of the character in which `content`, the next part, begins, and the text that it completes."""
        unfinished, _ = self._decoder.getstate()
        start = self.num_chars + (not _goes_on(unfinished, content))
        text = self._decoder.decode(content)
        self.num_chars += len(text)
        return start, text


def _goes_on(unfinished: bytes, content: bytes) -> bool:
    """Whether the first byte of `content` may be of the character that has begun, or of a new one where none has."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(unfinished + content[:1])
    except UnicodeDecodeError:
        return not unfinished
    return True
