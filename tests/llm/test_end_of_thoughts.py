"""The end of the thoughts before an answer, found token by token."""

import pytest

from raylens.llm.sampling.end_of_thoughts import EndOfThoughts


@pytest.mark.parametrize(
    ("tokens", "ends_at"),
    [
        (["I see", ".", "</think>", "Yes"], 2),
        (["a <", "/thi", "nk", ">\n\n", "Yes"], 3),
        (["<", "/", "t", "h", "i", "n", "k", ">"], 7),
        (["</thi", "s>", "</think", "s>"], None),
    ],
)
def test_the_tag_may_be_in_several_tokens(tokens: list[str], ends_at: int | None) -> None:
    ends = EndOfThoughts(lambda token_id: tokens[token_id].encode(), "</think>")
    assert next((index for index in range(len(tokens)) if ends(index)), None) == ends_at
