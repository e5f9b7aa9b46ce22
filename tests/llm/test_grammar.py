"""Whatever the logits, a constrained answer has the form that its request asked for."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from raylens.llm.byte_tokenizer import ByteTokenizer
from raylens.llm.sampling.grammar import GrammarCompiler
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.llm.sampling.structured_output import StructuredOutput
from raylens.preprocess.schema import InvalidRequestError
from tests.llm.sampling import sample

pytestmark = pytest.mark.usefixtures("module_with_kernels_and_without")

VOCAB = 768  # wider than the tokenizer, as padded logits are
EOS = frozenset({2})


@pytest.fixture(scope="module")
def tokenizer(shapes: str) -> Any:
    return AutoTokenizer.from_pretrained(shapes)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(tokenizer, VOCAB, EOS))


def state(compiler: GrammarCompiler, wish: StructuredOutput, **params: Any) -> SamplerState:
    wanted = SamplingParams(structured_output=wish, **params)
    return SamplerState(wanted, (1,), vocab_size=VOCAB, eos_token_ids=EOS, grammar=compiler.compile(wish))


def answers(tokenizer: Any, states: list[SamplerState], seed: int, max_tokens: int = 600) -> list[str | None]:
    """What comes of random logits, in one batch that its members leave as they end; None has not ended."""
    generator = torch.Generator().manual_seed(seed)
    running = dict(enumerate(states))
    tokens: dict[int, list[int]] = {index: [] for index in running}
    for _ in range(max_tokens):
        rows = list(running)
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
        for row, token in zip(rows, sample(logits, [running[row] for row in rows]), strict=True):
            assert token is not None
            if token.token_id in EOS:
                del running[row]
            else:
                tokens[row].append(token.token_id)
        if not running:
            break
    return [None if row in running else tokenizer.decode(own) for row, own in tokens.items()]


def ended(tokenizer: Any, states: list[SamplerState], seed: int = 0) -> list[str]:
    texts = answers(tokenizer, states, seed)
    assert None not in texts
    return [text for text in texts if text is not None]


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        st.integers(-99, 99),
        st.integers(0, 999),
    ),
    st.builds(lambda length: {"type": "string", "maxLength": length}, st.integers(0, 8)),
    st.builds(lambda length: {"type": "string", "pattern": f"^[a-f]{{{length}}}$"}, st.integers(1, 8)),
    st.lists(st.integers(-5, 5) | st.text(max_size=5) | st.booleans(), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
)


def containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(objects, st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3), st.booleans()),
        st.lists(inner, min_size=1, max_size=2).map(lambda ways: {"anyOf": ways}),
    )


def objects(properties: dict[str, Any], all_required: bool) -> dict[str, Any]:
    required = list(properties) if all_required else []
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.long
@given(schema=st.recursive(LEAVES, containers, max_leaves=6), seed=st.integers(0, 2**32))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_random_logits_give_valid_json(tokenizer: Any, compiler: GrammarCompiler, schema: Any, seed: int) -> None:
    wish = StructuredOutput(json_schema=schema)
    states = [state(compiler, wish, temperature=t, seed=seed, min_tokens=n) for t, n in ((0.0, 0), (1.0, 0), (1.5, 9))]
    for text in ended(tokenizer, states, seed):
        jsonschema.validate(json.loads(text), schema)


def test_each_row_has_the_form_it_asked_for(tokenizer: Any, compiler: GrammarCompiler) -> None:
    """All kinds in one batch, several answers each."""
    colours = ("red", "dark green", 'a "quoted" one\\', "grün €", "x\ny/z")
    lark = 'start: "(" (start | "a" | "b") ")"'
    gbnf = 'root ::= "yes" | "no" [0-9]'
    wishes = {
        "regex": StructuredOutput(regex=r"[a-c]{2,5}/\d\.x"),
        "choice": StructuredOutput(choice=colours),
        "gbnf": StructuredOutput(grammar=gbnf),
        "lark": StructuredOutput(grammar=lark),
    }
    states = [state(compiler, wish, temperature=1.0, seed=seed) for wish in wishes.values() for seed in range(8)]
    texts = ended(tokenizer, states)
    assert all(re.fullmatch(r"[a-c]{2,5}/[0-9]\.x", text) for text in texts[:8])
    assert set(texts[8:16]) <= set(colours)
    assert len(set(texts[8:16])) > 1
    assert all(re.fullmatch("yes|no[0-9]", text) for text in texts[16:24])
    assert all(re.fullmatch(r"\(+[ab]\)+", text) and text.count("(") == text.count(")") for text in texts[24:])


@pytest.mark.parametrize("choice", ['"', "\\", "\n\t\r", "é😀", "/x/", "\x00", "a ", "%json", "a|b", "<x>"])
def test_a_choice_is_taken_literally(tokenizer: Any, compiler: GrammarCompiler, choice: str) -> None:
    (text,) = ended(tokenizer, [state(compiler, StructuredOutput(choice=(choice,)), temperature=0.0)])
    assert text == choice


def test_a_json_object_begins_as_one(tokenizer: Any, compiler: GrammarCompiler) -> None:
    (text,) = answers(tokenizer, [state(compiler, StructuredOutput(json_object=True), temperature=1.0)], 1, 4000)
    assert text is None or isinstance(json.loads(text), dict)
    matcher = compiler.compile(StructuredOutput(json_object=True)).new_matcher()
    for token_id in tokenizer.encode('{"a": [1, {}]}', add_special_tokens=False):
        matcher.advance(token_id)
    assert matcher.is_complete


def test_blanks_do_not_go_on_for_ever(tokenizer: Any, compiler: GrammarCompiler) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, tokenizer.encode(" ", add_special_tokens=False)] = 50.0
    own = state(compiler, StructuredOutput(json_schema={"type": "array", "items": {"type": "null"}, "maxItems": 1}))
    for _ in range(100):
        (token,) = sample(logits.clone(), [own])
        assert token is not None
        if token.token_id in EOS:
            return
    raise AssertionError("still blanks after 100 tokens")


def test_only_the_end_follows_a_complete_form(tokenizer: Any) -> None:
    """Both of the model's end tokens, and before `min_tokens` too: the form of the answer goes before its length."""
    several = GrammarCompiler(ByteTokenizer(tokenizer, VOCAB, frozenset({2, 3})))
    wish = StructuredOutput(choice=("a",))
    params = SamplingParams(temperature=0.0, min_tokens=50, logit_bias={5: 100.0}, structured_output=wish)
    for likeliest in (2, 3):
        own = SamplerState(params, (), vocab_size=VOCAB, eos_token_ids=frozenset({2, 3}), grammar=several.compile(wish))
        assert not own.is_complete
        (token,) = sample(torch.zeros(1, VOCAB), [own])
        assert token is not None
        assert tokenizer.decode([token.token_id]) == "a"
        assert own.is_complete
        logits = torch.zeros(1, VOCAB)
        logits[0, likeliest] = 1.0
        (token,) = sample(logits, [own])
        assert token is not None
        assert token.token_id == likeliest


def test_min_tokens_delay_an_end_that_the_form_leaves_open(tokenizer: Any, compiler: GrammarCompiler) -> None:
    """`a*` may end at once; with `min_tokens` it goes on."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 10.0
    own = state(compiler, StructuredOutput(regex="a*"), min_tokens=3)
    tokens = [sample(logits.clone(), [own])[0] for _ in range(4)]
    assert [token and token.token_id == 2 for token in tokens] == [False, False, False, True]


def test_rows_without_a_form_are_untouched(compiler: GrammarCompiler) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    free = SamplerState(SamplingParams(), (), vocab_size=VOCAB)
    expected = logits.argmax(dim=-1).tolist()
    sampled = sample(logits, [free, state(compiler, StructuredOutput(choice=("a",))), free])
    assert [token and token.token_id for token in sampled][::2] == expected[::2]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: StructuredOutput(json_schema={"type": "objec"}), "json_schema"),
        (lambda: StructuredOutput(json_schema={"not": {"type": "null"}}), "json_schema"),
        (lambda: StructuredOutput(json_schema={"$ref": "#/nowhere"}), "json_schema"),
        (lambda: StructuredOutput(json_schema={"type": "string", "minLength": 3, "maxLength": 2}), "json_schema"),
        (lambda: StructuredOutput(regex="[a"), "regex"),
        (lambda: StructuredOutput(regex="(?=a)b"), "regex"),
        (lambda: StructuredOutput(regex="a/b("), "regex"),
        (lambda: StructuredOutput(grammar='start: "a" unknown'), "grammar"),
        (lambda: StructuredOutput(grammar="root ::= ("), "grammar"),
        (lambda: StructuredOutput(grammar=""), "grammar"),
    ],
)
def test_what_cannot_be_compiled_names_the_field(
    compiler: GrammarCompiler, make: Callable[[], StructuredOutput], field: str
) -> None:
    with pytest.raises(InvalidRequestError, match="must be one that can be compiled and followed, got: .") as caught:
        compiler.compile(make())
    assert caught.value.field == field
    assert "\n" not in caught.value.reason


def test_a_grammar_that_fails_on_the_way_ends_its_own_row(
    compiler: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    own, neighbour = (state(compiler, StructuredOutput(choice=("ab", "cd")), temperature=1.0) for _ in range(2))
    assert not own.append(500)
    broken, sound = sample(torch.zeros(2, VOCAB), [own, neighbour])
    assert broken is None
    assert sound is not None
    assert "a grammar failed on the way" in caplog.text
    assert not own.is_complete


def test_the_text_of_a_special_token_ends_its_own_row_only(tokenizer: Any, compiler: GrammarCompiler) -> None:
    """The library takes it for the token, which is no text. Where it can be told beforehand, it is refused."""
    with pytest.raises(InvalidRequestError, match="choice: must be without the model's special tokens, got <s>"):
        compiler.compile(StructuredOutput(choice=("a", "b<s>")))
    with pytest.raises(InvalidRequestError, match="regex: must be one that can be compiled and followed"):
        compiler.compile(StructuredOutput(regex="<s>"))
    # Further on than the check goes.
    broken, sound = (state(compiler, StructuredOutput(regex=f"[a-z]{{1000}}{end}")) for end in ("<s>", "<t>"))
    logits = torch.zeros(2, VOCAB)
    while (tokens := sample(logits.clone(), [broken, sound]))[0] is not None:
        pass
    assert tokens[1] is not None
    failures = [own.failure.field if own.failure else None for own in (broken, sound)]
    assert failures == ["regex", None]


@pytest.mark.parametrize("regex", ["a\nb", r"\d\w/\/", "\"'", "a|", r"(?i)x"])
def test_a_regex_is_matched_as_a_whole(tokenizer: Any, compiler: GrammarCompiler, regex: str) -> None:
    wish = StructuredOutput(regex=regex)
    for text in ended(tokenizer, [state(compiler, wish, temperature=1.0, seed=seed) for seed in range(8)]):
        assert re.fullmatch(regex, text, re.ASCII)


def test_equal_forms_are_compiled_once_and_share_nothing(tokenizer: Any, compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    first = compiler.compile(StructuredOutput(json_schema=schema))
    assert compiler.compile(StructuredOutput(json_schema=json.dumps(schema))) is first
    other_order = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    assert compiler.compile(StructuredOutput(json_schema=other_order)) is not first
    ahead, behind = first.new_matcher(), first.new_matcher()
    (brace,) = tokenizer.encode("{", add_special_tokens=False)
    ahead.advance(brace)
    assert behind.advance(brace)  # still at its start


def test_threads_may_compile_at_once(tokenizer: Any) -> None:
    compiler = GrammarCompiler(ByteTokenizer(tokenizer, VOCAB, EOS))
    wishes = [StructuredOutput(regex=f"[a-z]{{{1 + i % 8}}}x") for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        grammars = list(pool.map(compiler.compile, wishes))
    assert len(set(grammars)) == 8


def test_logits_may_be_narrower_than_the_tokenizer(tokenizer: Any) -> None:
    """Tokens without a logit are never chosen, and an end token that is none of the tokenizer's is left out."""
    vocab, eos = 600, frozenset({2, 5000})
    assert vocab < len(tokenizer)
    wish = StructuredOutput(choice=("a",))
    grammar = GrammarCompiler(ByteTokenizer(tokenizer, vocab, eos)).compile(wish)
    params = SamplingParams(structured_output=wish)
    own = SamplerState(params, (), vocab_size=vocab, eos_token_ids=eos, grammar=grammar)
    tokens = [sample(torch.zeros(1, vocab), [own])[0] for _ in range(2)]
    assert [token and tokenizer.decode([token.token_id]) for token in tokens] == ["a", "</s>"]


def test_a_tokenizer_of_another_library_is_refused_when_a_form_is_wanted() -> None:
    class Slow:
        def __len__(self) -> int:
            return 10

    compiler = GrammarCompiler(ByteTokenizer(Slow(), VOCAB, EOS))
    with pytest.raises(InvalidRequestError, match="regex: must be absent: Slow") as caught:
        compiler.compile(StructuredOutput(regex="a"))
    assert caught.value.field == "regex"


def test_a_state_takes_a_grammar_exactly_where_one_is_asked_for(compiler: GrammarCompiler) -> None:
    wish = StructuredOutput(regex="a")
    with pytest.raises(ValueError, match="structured_output"):
        SamplerState(SamplingParams(structured_output=wish), (), vocab_size=VOCAB)
    with pytest.raises(ValueError, match="structured_output"):
        SamplerState(SamplingParams(), (), vocab_size=VOCAB, grammar=compiler.compile(wish))
