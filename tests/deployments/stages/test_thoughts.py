"""Thoughts before an answer, told apart while the text comes."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.deployments.stages.thoughts import ThoughtSplitter
from raylens.preprocess.schema import ThoughtFormat

FORM = ThoughtFormat("<think>", "</think>")


def split(tokens: list[str], *, is_open: bool) -> tuple[str, str, int]:
    """The thoughts, the answer, and the number of tokens of the thoughts."""
    splitter = ThoughtSplitter(FORM, is_open=is_open)
    parts = [splitter.feed(token) for token in tokens]
    parts.append(splitter.flush(""))
    return "".join(thought for thought, _ in parts), "".join(text for _, text in parts), splitter.num_thought_tokens


@pytest.mark.parametrize(
    ("tokens", "is_open", "expected"),
    [
        (["\n", "I see", " a cat.", "\n", "</think>", "\n\n", "A cat", "."], True, ("I see a cat.", "A cat.", 5)),
        (["<think>", "Well", "</think>", "Yes"], False, ("Well", "Yes", 3)),
        ([" ", "<thi", "nk>", "Well", "</th", "ink>Yes"], False, ("Well", "Yes", 6)),
        (["Yes", ", <think> is a tag"], False, ("", "Yes, <think> is a tag", 0)),
        (["<thi", "s> is no tag"], False, ("", "<this> is no tag", 0)),
        (["<thi"], False, ("", "<thi", 0)),
        (["a < b, </th", "at> is none", "</think>"], True, ("a < b, </that> is none", "", 3)),
        (["cut off in a th", "ought </thi"], True, ("cut off in a thought </thi", "", 2)),
        (["</think>", "Yes. </think>"], True, ("", "Yes. </think>", 1)),
        ([" ", "\n"], False, ("", " \n", 0)),
        ([" ", "\n"], True, ("", "", 2)),
    ],
)
def test_thoughts_and_answers_are_told_apart(tokens: list[str], is_open: bool, expected: tuple[str, str, int]) -> None:
    assert split(tokens, is_open=is_open) == expected


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a", "é"]), max_size=12)


@given(parts=PARTS, cuts=st.lists(st.integers(0, 60), max_size=6), is_open=st.booleans())
@settings(max_examples=300, deadline=None)
def test_cuts_change_nothing(parts: list[str], cuts: list[int], is_open: bool) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert split(pieces, is_open=is_open)[:2] == split([text], is_open=is_open)[:2]
