"""Whatever a client sends for a grammar is refused or followed within bounds, and nothing of it reaches the engine."""

import random
import string
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import AutoTokenizer

from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.sampling.grammar import CompiledGrammar, GrammarCompiler
from raylens.llm.sampling.grammar_check import GrammarCheck
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import InvalidRequestError

OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}
MUTUAL = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
EXPLODING: dict[str, Any] = {
    "allOf": [{"anyOf": [{"properties": {f"{i}_{j}": {}}} for j in range(9)]} for i in range(9)]
}
TOO_LONG = "must be simpler: to compile and follow it for 64 tokens took more than 2 s"


def multiples_of(number: int) -> dict[str, Any]:
    """For a number of a million compiling takes some 7 s."""
    return {"type": "integer", "multipleOf": number}


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"$ref": "#"}}, "no text matches it"),
    ({"json_schema": MUTUAL}, "no text matches it"),
    ({"json_schema": OPTIONAL}, "max is 2000"),
    ({"json_schema": multiples_of(1_000_003)}, TOO_LONG),
    ({"json_schema": EXPLODING}, ""),
    ({"grammar": "start: start"}, "no text matches it"),
    ({"grammar": "start: a\na: a"}, "no text matches it"),
    ({"grammar": "root ::= root"}, "no text matches it"),
    ({"grammar": 'start: "a"~1000000'}, "Too many items"),
    ({"grammar": f"start: {'(' * 30_000}"}, ""),
    ({"regex": "((a{1,300}){1,300}){1,300}"}, "too many expressions"),
    ({"regex": f"{'(' * 30_000}a{')' * 30_000}"}, ""),
]


@pytest.fixture(scope="module")
def tokenizer(shapes: str) -> ByteTokenizer:
    return ByteTokenizer(AutoTokenizer.from_pretrained(shapes), 768, frozenset({2}))


@pytest.fixture(scope="module")
def compiler(tokenizer: ByteTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


@pytest.mark.parametrize(("wish", "reason"), HOSTILE)
def test_hostile_grammars_are_refused_by_name_and_the_next_is_not(
    compiler: GrammarCompiler, wish: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(StructuredOutput(**wish))
    assert caught.value.field in wish
    assert reason in caught.value.reason
    assert len(caught.value.reason) < 400
    compiler.compile(StructuredOutput(regex="[ab]+"))


@pytest.mark.long
def test_a_regex_of_100_000_letters_is_followed_within_the_bounds_or_refused(compiler: GrammarCompiler) -> None:
    """It takes about as long as a grammar may: how it ends depends on the machine."""
    letters = "".join(random.Random(0).choices(string.ascii_letters, k=100_000))
    outcome = compiler._outcome("regex", letters)
    assert isinstance(outcome, CompiledGrammar) or outcome == TOO_LONG


def test_a_refusal_is_remembered(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = StructuredOutput(grammar="start: again\nagain: again")
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            compiler.compile(wish)
        monkeypatch.setattr(GrammarCheck, "reason_against", None)  # which calling it a second time would show


@pytest.mark.long
def test_while_one_is_checked_the_known_ones_are_at_hand(compiler: GrammarCompiler) -> None:
    known, slow = StructuredOutput(regex="[cd]+"), StructuredOutput(json_schema=multiples_of(1_000_033))
    compiler.compile(known)
    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(compiler.compile, slow)
        while not compiler._check._lock.locked():
            time.sleep(0.001)
        compiler.compile(known)
        assert not checking.done()
        assert isinstance(checking.exception(), InvalidRequestError)


def test_a_child_that_cannot_start_is_no_fault_of_the_grammar(
    tokenizer: ByteTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    compiler = GrammarCompiler(tokenizer)
    with pytest.raises(RuntimeError, match="could not start: status 1"):
        compiler.compile(StructuredOutput(regex="[ef]+"))


def test_it_ends_with_whoever_asked(tokenizer: ByteTokenizer) -> None:
    check = GrammarCheck(tokenizer.arguments)
    assert check.reason_against("regex", "a") is None
    child = check._child
    assert child is not None
    assert child.poll() is None
    del check
    assert child.poll() is not None
