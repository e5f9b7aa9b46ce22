"""Streamed text: whole characters only, nothing of a stop string, and in the end what one decode gives."""

import itertools
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from raylens.llm.detokenizer import MAX_DECODED_TOKENS, Detokenizer, decoder_of


@pytest.fixture(scope="module")
def tokenizer(shapes: str) -> Any:
    return AutoTokenizer.from_pretrained(shapes)


def list_of_bytes(character: str) -> list[int]:
    return list(character.encode())


def stream(
    tokenizer: Any, token_ids: list[int], stop: tuple[str, ...] = (), *, size: int = 1, **settings: Any
) -> tuple[list[str], Detokenizer]:
    """`size` tokens at once."""
    detokenizer = Detokenizer(decoder_of(tokenizer), stop, **settings)
    pieces = []
    for start in range(0, len(token_ids), size):
        pieces.append(detokenizer.append(token_ids[start : start + size]))
        if detokenizer.stopped:
            return pieces, detokenizer
    return [*pieces, detokenizer.flush()], detokenizer


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_add_up_to_one_decode(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, _ = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=50, deadline=None)
@given(token_ids=st.lists(st.integers(0, 700), max_size=30))
def test_any_tokens_add_up_too(tokenizer: Any, token_ids: list[int]) -> None:
    pieces, _ = stream(tokenizer, token_ids)
    # After `MAX_DECODED_TOKENS` broken characters in a row the text is told as it is, and the next byte may change it.
    assume(not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in pieces[:-1]))
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.tuples(st.sampled_from([" one", "two", " ", "é"]), st.integers(0, 20)), max_size=8))
@example(words=[("one", MAX_DECODED_TOKENS), (" two", 0)])
@pytest.mark.parametrize("is_byte_fallback", [False, True])
def test_special_tokens_between_words_cost_no_blank(
    tokenizer: Any, words: list[tuple[str, int]], is_byte_fallback: bool
) -> None:
    if is_byte_fallback:
        tokenizer = byte_fallback_tokenizer()
    token_ids = []
    for word, num_special in words:
        token_ids += (
            tokenizer(word, add_special_tokens=False)["input_ids"] + num_special * tokenizer.all_special_ids[:1]
        )
    pieces, _ = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab é日本😀", max_size=20))
def test_byte_fallback_tokenizers_add_up_too(text: str) -> None:
    """Llama's kind: characters outside the vocabulary are spelt as bytes, and a broken run of them spoils whole."""
    tokenizer = byte_fallback_tokenizer()
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, _ = stream(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=True)


SPACE, LETTER_A, LETTER_B = 257, 258, 259
"""Tokens of `byte_fallback_tokenizer` behind those of bytes, which begin at 1."""

BYTES = st.sampled_from([*"あé😀a ".encode(), 0x20, 0x80, 0xC3, 0xE3, 0xF0, 0xFF])
"""Those of whole characters, and such as break them."""


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    spelt=st.lists(st.one_of(BYTES.map(lambda byte: [byte]), st.sampled_from(["あ", "é", "😀"]).map(list_of_bytes))),
    words=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([SPACE, LETTER_A, LETTER_B])), max_size=4),
    cuts=st.sets(st.integers(1, 60)),
    stop=st.sampled_from([(), ("a",), ("\N{REPLACEMENT CHARACTER}a",)]),
)
def test_broken_characters_are_the_same_text_in_whatever_pieces_tokens_come(
    spelt: list[list[int]], words: list[tuple[int, int]], cuts: set[int], stop: tuple[str, ...]
) -> None:
    tokenizer = byte_fallback_tokenizer()
    token_ids = [1 + byte for character in spelt for byte in character]
    for at, token_id in words:
        token_ids.insert(at, token_id)
    one_by_one, _ = stream(tokenizer, token_ids, stop)
    detokenizer = Detokenizer(decoder_of(tokenizer), stop)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    text = "".join(detokenizer.append(token_ids[start:end]) for start, end in itertools.pairwise(bounds))
    if not detokenizer.stopped:
        text += detokenizer.flush()
    assert text == "".join(one_by_one)


@pytest.mark.parametrize(
    ("spelt", "expected"),
    [
        (b"\xe3\x81\x82\xff", "あ\N{REPLACEMENT CHARACTER}a"),
        (b"\xff\xe3\x81\x82", "\N{REPLACEMENT CHARACTER}" * 4 + "a"),
        (b"\xe3\x81\x82\xe3\x81", "あ" + "\N{REPLACEMENT CHARACTER}" * 2 + "a"),
        (b"\x80" * 100, "\N{REPLACEMENT CHARACTER}" * 100 + "a"),
    ],
    ids=["behind", "before", "half", "many"],
)
def test_a_broken_character_spoils_none_that_have_been_told(spelt: bytes, expected: str) -> None:
    decoded: list[int] = []
    decode = decoder_of(byte_fallback_tokenizer())

    def counted(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return decode(token_ids)

    detokenizer = Detokenizer(counted)
    assert detokenizer.append([*(1 + byte for byte in spelt), LETTER_A]) + detokenizer.flush() == expected
    assert max(decoded) <= 2 * (MAX_DECODED_TOKENS + 1)


def byte_fallback_tokenizer() -> Any:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_token_costs_the_same_at_any_length(tokenizer: Any) -> None:
    """Also where tokens are no text at all."""
    decoded: list[int] = []

    def decode(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return decoder_of(tokenizer)(token_ids)

    for token_id in (tokenizer.eos_token_id, tokenizer("a", add_special_tokens=False)["input_ids"][0]):
        detokenizer = Detokenizer(decode)
        for _ in range(100):
            detokenizer.append([token_id])
    assert max(decoded) <= MAX_DECODED_TOKENS + 1


def test_half_a_character_is_never_sent(tokenizer: Any) -> None:
    token_ids = tokenizer("é€😀é", add_special_tokens=False)["input_ids"]
    assert len(token_ids) > 4
    pieces, _ = stream(tokenizer, token_ids)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(pieces) == "é€😀é"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("a red circle in the centre", ("in the",), "a red circle "),
        ("a red circle in the centre", ("circle", "red"), "a "),
        ("a red circle", ("circles",), "a red circle"),
        ("aaab", ("aab",), "a"),
        ("a red circle", ("a",), ""),
    ],
)
def test_stop_strings_end_the_text(tokenizer: Any, text: str, stop: tuple[str, ...], expected: str) -> None:
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, detokenizer = stream(tokenizer, token_ids, stop)
    assert "".join(pieces) == expected
    assert detokenizer.stopped == (expected != text)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab ", max_size=20), stop=st.text("ab ", min_size=1, max_size=4))
def test_no_piece_holds_any_of_a_stop_string(tokenizer: Any, text: str, stop: str) -> None:
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    decoded = tokenizer.decode(token_ids, skip_special_tokens=True)
    pieces, detokenizer = stream(tokenizer, token_ids, (stop,))
    assert "".join(pieces) == decoded.partition(stop)[0]
    assert detokenizer.stopped == (stop in decoded)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab é", max_size=20), stops=st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3))
@pytest.mark.parametrize("includes_stop", [False, True])
def test_the_text_does_not_depend_on_how_many_tokens_come_at_once(
    tokenizer: Any, text: str, stops: list[str], includes_stop: bool
) -> None:
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = {
        "".join(stream(tokenizer, token_ids, tuple(stops), size=size, includes_stop=includes_stop)[0])
        for size in (1, 2, 3, 100)
    }
    assert len(texts) == 1
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    first = min(ends, default=len(text))
    (told,) = texts
    if includes_stop:
        assert told == text[:first]
    else:
        assert text.startswith(told)
        assert not ends or any(told + stop == text[:first] for stop in stops)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, "one "), (1, "one "), (2, "one two one "), (3, "one two one "), (4, "one two one two one")],
)
def test_a_stop_string_of_the_first_tokens_is_text(tokenizer: Any, size: int, min_tokens: int, expected: str) -> None:
    token_ids = tokenizer("one two one two one", add_special_tokens=False)["input_ids"]
    assert len(token_ids) == 5, "the figures above are of"
    pieces, _ = stream(tokenizer, token_ids, ("two",), size=size, min_tokens=min_tokens)
    assert "".join(pieces) == expected


def test_a_stop_string_may_begin_among_the_first_tokens(tokenizer: Any) -> None:
    token_ids = tokenizer("one two one", add_special_tokens=False)["input_ids"]
    for min_tokens, expected in ((len(token_ids) - 1, "one "), (len(token_ids), "one two one")):
        pieces, _ = stream(tokenizer, token_ids, ("two one",), min_tokens=min_tokens)
        assert "".join(pieces) == expected


def test_special_tokens_are_told_where_they_are_asked_for(tokenizer: Any) -> None:
    token_ids = [*tokenizer("a red", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    for skips, expected in ((True, "a red"), (False, f"a red{tokenizer.eos_token}")):
        detokenizer = Detokenizer(decoder_of(tokenizer, skip_special_tokens=skips))
        assert detokenizer.append(token_ids) + detokenizer.flush() == expected
        assert detokenizer.num_chars == len(expected)


@settings(max_examples=60, deadline=None)
@given(before=st.text("ab é日", min_size=1, max_size=9), text=st.text("ab é日", max_size=9))
@pytest.mark.parametrize("is_byte_fallback", [False, True])
def test_a_text_that_goes_on_keeps_the_blank_that_opens_it(
    tokenizer: Any, before: str, text: str, is_byte_fallback: bool
) -> None:
    before = f"a{before}"
    if is_byte_fallback:
        tokenizer = byte_fallback_tokenizer()
    whole = tokenizer(before + text, add_special_tokens=False)["input_ids"]
    first = tokenizer(before, add_special_tokens=False)["input_ids"]
    if whole[: len(first)] != first:
        return  # another word over the bound
    detokenizer = Detokenizer(decoder_of(tokenizer), before=first)
    assert detokenizer.append(whole[len(first) :]) + detokenizer.flush() == text
    assert detokenizer.num_chars == len(text)


BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
FIRST_BLANK_DROPPED = decoders.Strip(" ", 1, 0)


def a_tokenizer(model: Any, decoder: Any) -> Any:
    """Returns a tokenizer of the model whose last token, `<image>`, is special."""
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def bpe(pieces: list[str], **options: Any) -> Any:
    return models.BPE({piece: number for number, piece in enumerate(pieces)}, [], **options)


def byte_level(*last: Any) -> Any:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġã", "ãģĤ", "ĠĠ", "ï¿½", "ab"]
    return a_tokenizer(bpe(pieces), decoders.Sequence([decoders.ByteLevel(), *last]) if last else decoders.ByteLevel())


def llama() -> Any:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), FIRST_BLANK_DROPPED]
    pieces = ["<unk>", *BYTE_PIECES, "▁", "▁▁", "a", "▁a", "b", "あ"]
    return a_tokenizer(bpe(pieces, byte_fallback=True), decoders.Sequence(parts))


def sentencepiece() -> Any:
    pieces = ["▁", "▁▁", "a", "▁a", "b", "▁b", "あ", "é"]
    return a_tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, False), decoders.Metaspace())


def wordpiece() -> Any:
    pieces = {piece: number for number, piece in enumerate(["[UNK]", "a", "##a", "b", "##b", ".", "あ"])}
    return a_tokenizer(models.WordPiece(pieces, unk_token="[UNK]"), decoders.WordPiece(cleanup=False))


def word_ends() -> Any:
    return a_tokenizer(bpe(["a", "a</w>", "b", "b</w>", "あ</w>"]), decoders.BPEDecoder("</w>"))


def slow() -> Any:
    tokenizer = byte_level(FIRST_BLANK_DROPPED)
    tokenizer.clean_up_tokenization_spaces = True
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-level, first blank dropped": byte_level(FIRST_BLANK_DROPPED),
    "llama": llama(),
    "sentencepiece": sentencepiece(),
    "wordpiece": wordpiece(),
    "word ends": word_ends(),
    "without the library's fast decoder": slow(),
}


def spelt(tokenizer: Any) -> list[list[int]]:
    """Returns characters spelt in bytes, where the tokenizer has tokens of bytes."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = []
    for character in "あé":
        ((as_letters, _),) = byte_level.pre_tokenize_str(character)
        for names in (list(as_letters), [BYTE_PIECES[byte] for byte in character.encode()]):
            if set(names) <= set(tokenizer.get_vocab()):
                found.append(tokenizer.convert_tokens_to_ids(names))
    return found


def listed(parts: st.SearchStrategy[list[int]], max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(parts, max_size=max_size).map(lambda several: [token_id for part in several for token_id in part])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), num_placeholders=st.sampled_from([0, 1, 40]), picture_at=st.integers(0, 9), skips=st.booleans())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_answer_is_what_its_prompt_lacks_of_the_text_of_both(
    name: str, data: st.DataObject, num_placeholders: int, picture_at: int, skips: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    decode, last = decoder_of(tokenizer, skip_special_tokens=skips), len(tokenizer) - 1
    tokens = st.one_of(st.integers(0, last), st.integers(max(0, last - 8), last)).map(lambda token_id: [token_id])
    parts = st.one_of(tokens, *map(st.just, spelt(tokenizer)))
    prompt, seam, answer = data.draw(st.tuples(listed(parts, 4), listed(parts, 1), listed(parts, 6)))
    cut = data.draw(st.integers(0, len(seam)))
    prompt, answer = prompt + seam[:cut], seam[cut:] + answer
    prompt[picture_at:picture_at] = num_placeholders * [last]
    before, whole = decode(prompt), decode(prompt + answer)
    # Here one broken character spoils all whole ones that are spelt in bytes beside it.
    assume(name != "llama" or "\N{REPLACEMENT CHARACTER}" not in whole)
    detokenizer = Detokenizer(decode, before=prompt)
    text = detokenizer.append(answer) + detokenizer.flush()
    is_within_character = not whole.startswith(before)
    assert text == whole.removeprefix(before.rstrip("\N{REPLACEMENT CHARACTER}") if is_within_character else before)
    assert detokenizer.num_chars == len(text)


def test_the_tokens_of_pictures_before_an_answer_cost_next_to_nothing(tokenizer: Any) -> None:
    decoded: list[int] = []

    def decode(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return decoder_of(tokenizer)(token_ids)

    picture, (word,) = tokenizer.convert_tokens_to_ids("<image>"), tokenizer(" red", add_special_tokens=False).input_ids
    detokenizer = Detokenizer(decode, before=[word, *10_000 * [picture]])
    assert detokenizer.append([word]) == " red"
    assert sum(decoded) < MAX_DECODED_TOKENS


def test_the_first_tokens_are_counted_without_those_before(tokenizer: Any) -> None:
    before, token_ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("one", " two one two"))
    for min_tokens, expected in ((0, " "), (1, " two one ")):
        detokenizer = Detokenizer(decoder_of(tokenizer), ("two",), min_tokens=min_tokens, before=before)
        assert detokenizer.append(token_ids) == expected


class Spaced:
    """A tokenizer whose text transformers itself has to put right."""

    is_fast = True
    clean_up_tokenization_spaces = True
    backend_tokenizer: Any = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return f"{token_ids} {skip_special_tokens}"


def test_what_transformers_does_after_decoding_is_not_left_out() -> None:
    assert decoder_of(Spaced())([1, 2]) == "[1, 2] True"
