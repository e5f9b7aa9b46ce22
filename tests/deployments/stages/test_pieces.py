"""What the engine's outputs become on their way to the ingress, with a real tokenizer."""

import copy
import itertools
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from raylens.deployments.stages.pieces import PieceMaker
from raylens.deployments.stages.thoughts import ThoughtSplitter
from raylens.deployments.wire.stage_messages import GeneratedText
from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.detokenizer import Detokenizer, decoder_of
from raylens.llm.outputs import RequestOutput
from raylens.llm.sampling.logprobs import TokenLogprobs
from raylens.llm.sequence import FinishReason, SequenceTimes
from raylens.preprocess.schema import ThoughtFormat


@pytest.fixture(scope="module")
def tokenizer(shapes: str) -> Any:
    return AutoTokenizer.from_pretrained(shapes)


class Asked:
    """A request whose answers may end in `stop`, and begin with thoughts of the form `thoughts`."""

    def __init__(
        self, tokenizer: Any, *stop: str, includes_stop: bool = False, thoughts: ThoughtFormat | None = None
    ) -> None:
        self._tokenizer = tokenizer
        byte_tokenizer = ByteTokenizer(tokenizer, len(tokenizer), frozenset())
        self.maker = PieceMaker(
            byte_tokenizer,
            lambda: Detokenizer(decoder_of(tokenizer), stop, includes_stop=includes_stop),
            None,
            includes_stop=includes_stop,
            make_splitter=None if thoughts is None else partial(ThoughtSplitter, thoughts, is_open=False),
        )

    def token_ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def outputs(
        self, text: str, *, index: int = 0, has_stop_token: bool = False, is_scored: bool = False
    ) -> list[RequestOutput]:
        """An output for each token of the text, the last of which ends the answer."""
        token_ids = self.token_ids(text)
        return [
            RequestOutput(
                "a",
                index=index,
                token_ids=[token_id],
                logprobs=[TokenLogprobs(token_id, -1.0, 1, [])] if is_scored else [],
                prompt_logprobs=[],
                num_prompt_tokens=1,
                num_cached_tokens=0,
                num_output_tokens=position,
                finish_reason=FinishReason.STOP if position == len(token_ids) else None,
                has_stop_token=has_stop_token and position == len(token_ids),
                times=SequenceTimes(0.0, 1.0, 2.0, 3.0),
            )
            for position, token_id in enumerate(token_ids, 1)
        ]


def joined(pieces: list[GeneratedText]) -> str:
    return "".join(piece.text for piece in pieces)


@settings(deadline=None)
@given(text=st.text("ab é日😀", min_size=1, max_size=30), cuts=st.sets(st.integers(1, 60)))
def test_text_is_the_same_however_many_steps_a_piece_is_of(tokenizer: Any, text: str, cuts: set[int]) -> None:
    asked = Asked(tokenizer)
    outputs = asked.outputs(text)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(outputs)), len(outputs)]
    pieces = [piece for start, end in itertools.pairwise(bounds) for piece in asked.maker(outputs[start:end])]
    assert joined(pieces) == tokenizer.decode(asked.token_ids(text))
    assert [token_id for piece in pieces for token_id in piece.token_ids] == asked.token_ids(text)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]


def test_a_stop_token_is_told_but_no_text(tokenizer: Any) -> None:
    asked = Asked(tokenizer)
    outputs = asked.outputs("a red circle", has_stop_token=True)
    (piece,) = asked.maker(outputs)
    assert piece.token_ids == asked.token_ids("a red circle")
    assert "a red circle".startswith(piece.text)
    assert 0 < len(piece.text) < len("a red circle")


@pytest.mark.parametrize("size", [1, 100])
def test_text_ends_before_a_stop_string(tokenizer: Any, size: int) -> None:
    asked = Asked(tokenizer, "circle")
    outputs = asked.outputs("a red circle")
    pieces = [piece for start in range(0, len(outputs), size) for piece in asked.maker(outputs[start : start + size])]
    assert joined(pieces) == "a red "


def test_each_answer_has_a_text_of_its_own(tokenizer: Any) -> None:
    asked = Asked(tokenizer)
    first, second = asked.outputs("a red circle"), asked.outputs("two blue squares", index=1)
    told = ["", ""]
    for outputs in (second[:1], [*first[:2], *second[1:]], first[2:]):
        for piece in asked.maker(outputs):
            told[piece.index] += piece.text
    assert told == ["a red circle", "two blue squares"]


def test_a_stop_token_is_text_where_stops_are(tokenizer: Any) -> None:
    asked = Asked(tokenizer, includes_stop=True)
    (piece,) = asked.maker(asked.outputs("a red circle", has_stop_token=True))
    assert piece.text == "a red circle"


@pytest.mark.long
@settings(deadline=None)
@given(text=st.text("ab é日😀", min_size=1, max_size=30), cuts=st.sets(st.integers(1, 60)))
def test_scored_tokens_begin_in_the_character_of_their_first_byte(tokenizer: Any, text: str, cuts: set[int]) -> None:
    asked = Asked(tokenizer)
    outputs = asked.outputs(text, is_scored=True)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(outputs)), len(outputs)]
    pieces = [piece for start, end in itertools.pairwise(bounds) for piece in asked.maker(outputs[start:end])]
    told = joined(pieces)
    scored = [token for piece in pieces for token in piece.logprobs]
    owners = [index for index, character in enumerate(told) for _ in character.encode()]
    # The tokenizer's blank before a text is the first token's and no part of the text.
    position = len(owners) - sum(len(token.content) for token in scored)
    assert position in (0, -1)
    for token in scored:
        assert token.offset == [*owners, len(told)][max(position, 0)]
        position += len(token.content)


def test_text_behind_a_stop_string_is_held_back_and_counted(tokenizer: Any) -> None:
    text = "é red, é circle"
    asked = Asked(tokenizer, "red, é square")
    (piece,) = asked.maker(asked.outputs(text, is_scored=True))
    told = [token.content for token in piece.logprobs]
    assert piece.text == text
    for number, token in enumerate(piece.logprobs):
        assert token.offset == len(b"".join(told[:number]).decode(errors="ignore").lstrip())


@pytest.mark.parametrize("is_special", [False, True], ids=["", "special tokens"])
@pytest.mark.parametrize("is_merged", [False, True], ids=["", "merged"])
def test_thoughts_are_no_text(tokenizer: Any, is_special: bool, is_merged: bool) -> None:
    own = copy.deepcopy(tokenizer)
    tags = ["[THINK]", "[/THINK]"]
    own.add_tokens(tags, special_tokens=is_special)
    asked = Asked(own, thoughts=ThoughtFormat(*tags))
    outputs = asked.outputs("[THINK]It is é. [/THINK]\nYes: é", is_scored=True)
    pieces = asked.maker(outputs) if is_merged else [piece for output in outputs for piece in asked.maker([output])]
    assert ("".join(piece.thought for piece in pieces), joined(pieces)) == ("It is é.", "Yes: é")
    assert pieces[-1].num_thought_tokens == len(asked.token_ids("[THINK]It is é. [/THINK]"))
    assert sum(len(piece.logprobs) for piece in pieces) == len(outputs)


def test_the_beginning_of_a_stop_string_in_thoughts_is_told_once(tokenizer: Any) -> None:
    """It is also the beginning of a tag, but no tag."""
    asked = Asked(tokenizer, "<|im_end|>", thoughts=ThoughtFormat("<think>", "</think>"))
    pieces = [piece for one in asked.outputs("<think>a < b <</think>c") for piece in asked.maker([one])]
    assert "".join(piece.thought for piece in pieces) == "a < b <"
    assert joined(pieces) == "c"
