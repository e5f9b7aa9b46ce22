"""Finds the character in which each token begins, even if a token holds only a part of a character."""

import codecs


class CharacterStarts:
    """Decodes one text's bytes. `num_chars`: complete characters so far; invalid bytes are replacement characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_chars = 0

    def feed(self, content: bytes) -> tuple[int, str]:
        """Returns the index of the next bytes' (`content`) first character, and the text that they complete."""
        unfinished, _ = self._decoder.getstate()
        start = self.num_chars + (not _goes_on(unfinished, content))
        text = self._decoder.decode(content)
        self.num_chars += len(text)
        return start, text


def _goes_on(unfinished: bytes, content: bytes) -> bool:
    """Returns whether `content`'s first byte can continue the unfinished character, if any, or else start one."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(unfinished + content[:1])
    except UnicodeDecodeError:
        return not unfinished
    return True
