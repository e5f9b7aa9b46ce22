"""Bytes of a text, in parts, and the characters in which these begin."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from raylens.deployments.stages.pieces import CharacterStarts


@given(text=st.text("ab é日😀\N{REPLACEMENT CHARACTER}", max_size=12), cuts=st.sets(st.integers(0, 48)))
def test_parts_begin_in_the_character_of_their_first_byte(text: str, cuts: set[int]) -> None:
    content = text.encode()
    owners = [index for index, character in enumerate(text) for _ in character.encode()]
    bounds = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    starts = CharacterStarts()
    for start, end in itertools.pairwise(bounds):
        assert starts.feed(content[start:end])[0] == owners[start]
    assert starts.num_chars == len(text)


def test_bytes_of_no_character_count_as_replacement_characters() -> None:
    parts = [b"\xff", b"\xff", b"\xe6", b"a", b"\xe6\x97", b"\xff", b"b"]
    text = b"".join(parts).decode(errors="replace")
    assert text == "\N{REPLACEMENT CHARACTER}" * 3 + "a" + "\N{REPLACEMENT CHARACTER}" * 2 + "b"
    starts = CharacterStarts()
    assert [starts.feed(part)[0] for part in parts] == [0, 1, 2, 3, 4, 5, 6]
    assert starts.num_chars == len(text)
