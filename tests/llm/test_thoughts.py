"""The thoughts before an answer, followed token by token."""

from typing import Any

import pytest

from raylens.llm.sampling.thoughts import Thoughts
from raylens.preprocess.schema import ThoughtFormat

THINK = ThoughtFormat("<think>", "</think>")


class Tokens:
    """Stands for the tokenizer: words by their numbers; all others are spelled letter by letter."""

    def __init__(self, words: list[str | bytes]) -> None:
        self.words = words

    def token_bytes(self, token_id: int) -> bytes:
        word: Any = self.words[token_id]
        return word if isinstance(word, bytes) else word.encode()

    def spellings(self, text: str) -> list[tuple[int, ...]]:
        if text in self.words:
            return [(self.words.index(text),)]
        return [tuple(self.words.index(letter) for letter in text)]


def thoughts_of(words: list[str | bytes], *, is_open: bool, budget: int | None = None) -> Thoughts:
    tokens: Any = Tokens([*words, *"<>/think"])
    return Thoughts(tokens, THINK, is_open=is_open, budget=budget)


@pytest.mark.parametrize(
    ("tokens", "ends_at"),
    [
        (["I see", ".", "</think>", "Yes"], 2),
        (["a <", "/thi", "nk", ">\n\n", "Yes"], 3),
        (["<", "/", "t", "h", "i", "n", "k", ">"], 7),
        (["</thi", "s>", "</think", "s>"], None),
    ],
)
def test_the_end_tag_may_be_in_several_tokens(tokens: list[str | bytes], ends_at: int | None) -> None:
    thoughts = thoughts_of(tokens, is_open=True)
    found = None
    for index in range(len(tokens)):
        if not thoughts.is_over:
            thoughts.append(index)
            found = index if thoughts.is_over else None
    assert found == ends_at


@pytest.mark.parametrize(
    ("tokens", "think_at"),
    [
        (["<think>", "I"], 0),
        (["\n", "<th", "ink", ">I"], 3),
        (["<thin", "g>"], None),
        (["I", "<think>"], None),
    ],
)
def test_an_answer_may_begin_with_the_start_tag(tokens: list[str | bytes], think_at: int | None) -> None:
    thoughts = thoughts_of(tokens, is_open=False)
    thinking = []
    for index in range(len(tokens)):
        thoughts.append(index)
        thinking.append(thoughts.is_thinking)
    assert (thinking.index(True) if True in thinking else None) == think_at
    assert thoughts.is_over == (think_at is None)


def forced_after(thoughts: Thoughts, tokens: list[int]) -> int | None:
    for token_id in tokens:
        assert thoughts.forced_token_ids is None
        thoughts.append(token_id)
    return None if thoughts.forced_token_ids is None else int(thoughts.forced_token_ids[0])


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_the_end_tag_has_to_come_after_the_budget(budget: int) -> None:
    thoughts = thoughts_of(["I", "</think>"], is_open=True, budget=budget)
    assert forced_after(thoughts, [0] * budget) == 1
    thoughts.append(1)
    assert (thoughts.is_over, thoughts.forced_token_ids) == (True, None)


def test_the_budget_counts_from_a_start_tag_that_the_model_writes() -> None:
    thoughts = thoughts_of(["<think>", "I", "</think>"], is_open=False, budget=2)
    assert forced_after(thoughts, [0, 1, 1]) == 2
    answering = thoughts_of(["<think>", "I", "</think>"], is_open=False, budget=0)
    assert forced_after(answering, [1, 1]) is None


def test_an_end_tag_of_several_tokens_comes_whole() -> None:
    words: list[str | bytes] = ["I"]
    thoughts = thoughts_of(words, is_open=True, budget=1)
    thoughts.append(0)
    written = ""
    while (forced := thoughts.forced_token_ids) is not None:
        written += str([*words, *"<>/think"][int(forced[0])])
        thoughts.append(int(forced[0]))
    assert (written, thoughts.is_over) == ("</think>", True)


def test_no_character_is_cut_but_a_run_of_halves_is() -> None:
    first, rest = "é".encode()[:1], "é".encode()[1:]
    words: list[str | bytes] = [first, rest, "</think>"]
    assert forced_after(thoughts_of(words, is_open=True, budget=1), [0, 1]) == 2
    assert forced_after(thoughts_of(words, is_open=True, budget=1), [0] * 5) == 2


def test_only_a_start_tag_of_one_token_can_be_told_from_a_form() -> None:
    assert thoughts_of(["<think>"], is_open=False).opening_token_id == 0
    assert thoughts_of(["I"], is_open=False).opening_token_id is None
    assert thoughts_of(["<think>"], is_open=True).opening_token_id is None
