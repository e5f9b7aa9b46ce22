"""Prompt updates on token ids come out as if the updated text had been tokenised at once."""

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from raylens.preprocess.prompt_tokenizer import PromptTokenizer, TokenIds, token_ids
from raylens.preprocess.prompt_updates import (
    FrameInsertion,
    Position,
    PromptInsertion,
    PromptReplacement,
    PromptRules,
    PromptUpdate,
    apply_updates,
)
from raylens.preprocess.schema import InvalidRequestError, ItemExpansion, PlaceholderRange
from tests.preprocess.small_tokenizers import BOS, CONTROL, Prefix, Vocabulary, small_tokenizer

EMBED, START, END, TARGET = "<patch>", "<start>", "<end>", "<image>"
# No token, and the letters at its edges are parts of tokens with what stands beside it.
TEXT_TARGET = "> pic <"
TOKENIZERS: tuple[tuple[Vocabulary, Prefix], ...] = (
    ("byte_level", "never"),
    ("metaspace", "first"),
    ("metaspace", "legacy"),
    ("metaspace", "never"),
)
TEXTS = (
    "",
    "a",
    "a<",
    ">a",
    "\n",
    "\n\n",
    " ",
    "Frame",
    "\nWhat",
    "one. ",
    ": ",
    "zwei  ",
    "é",
    "<|",
    "Look: ",
    "> and",
)


# Other processes may share the machine with the tests.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Subject:
    """Updates with a tokenizer of one kind, and what should come of them."""

    def __init__(self, vocabulary: Vocabulary, prefix: Prefix, *, bos: bool) -> None:
        tokenizer = small_tokenizer(vocabulary, (EMBED, START, END, TARGET), prefix=prefix, bos=bos)
        names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), CONTROL, strict=True))
        self.hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
        self.tokenizer = PromptTokenizer(self.hf, {EMBED})
        # The space that the tokenizer puts before a text hides whether it began with one.
        self._hides_space = vocabulary == "metaspace" and prefix == "first"
        # Its newlines are Gemma's, which no tokenizer has that puts spaces before them, too.
        self._breaks_at_newlines = vocabulary == "metaspace" and prefix == "legacy"

    def can_tell(self, text: str) -> bool:
        """Whether the ids of `text` determine it."""
        return not (self._hides_space and text.startswith(" ")) and not (self._breaks_at_newlines and "\n\n" in text)

    def ids(self, text: str, *, special: bool = True) -> TokenIds:
        return token_ids(self.hf(text, add_special_tokens=special)["input_ids"])

    def one(self, token: str) -> int:
        return self.tokenizer.token_id(token)

    def item(self, text: str) -> ItemExpansion:
        before, ids, after = self.tokenizer.content(text)
        embeds = np.flatnonzero(ids == self.one(EMBED))
        return ItemExpansion(ids, PlaceholderRange(int(embeds[0]), len(embeds)), before, after)

    def apply(
        self,
        ids: TokenIds,
        items: Sequence[str],
        update: PromptUpdate,
        frame: Sequence[FrameInsertion] = (),
        *,
        keeps_special_tokens: bool = True,
    ) -> list[int]:
        """The updated prompt; checks that the placeholders are where the embeddings belong."""
        pairs = [("image", self.item(text)) for text in items]
        rules = PromptRules({"image": update}, tuple(frame))
        if not keeps_special_tokens:
            ids = self.tokenizer.without_special_tokens(ids)
        updated, placeholders = apply_updates(ids, pairs, rules, self.tokenizer)
        positions = [index for one in placeholders for index in range(one.offset, one.offset + one.length)]
        assert positions == np.flatnonzero(updated == self.one(EMBED)).tolist()
        assert [one.num_embeds for one in placeholders] == [item.features.num_embeds for _, item in pairs]
        again, same = apply_updates(updated, pairs, rules, self.tokenizer)
        if items:
            assert again.tolist() == updated.tolist(), "expanded already"
            assert same == placeholders
        return [int(one) for one in updated]


@functools.cache
def subject(vocabulary: Vocabulary = "byte_level", prefix: Prefix = "never", *, bos: bool = True) -> Subject:
    return Subject(vocabulary, prefix, bos=bos)


@pytest.fixture(params=TOKENIZERS, ids=lambda param: "-".join(param))
def any_subject(request: pytest.FixtureRequest) -> Subject:
    return subject(*request.param)


subjects = st.builds(
    lambda kind, bos: subject(*kind, bos=bos),
    st.sampled_from(TOKENIZERS),
    st.booleans(),
)
texts = st.lists(st.sampled_from(TEXTS), max_size=3).map("".join)
item_texts = st.builds(
    lambda before, number, after: f"{before}{START}{EMBED * number}{END}{after}", texts, st.integers(1, 4), texts
)


@pytest.mark.long
@unhurried
@given(subject=subjects, target=st.sampled_from([TARGET, TEXT_TARGET]), data=st.data())
def test_replacement_is_as_if_the_expanded_text_had_been_tokenised(
    subject: Subject, target: str, data: st.DataObject
) -> None:
    items = data.draw(st.lists(item_texts, min_size=1, max_size=3))
    parts = data.draw(st.lists(texts, min_size=len(items) + 1, max_size=len(items) + 1))
    prompt = target.join(parts)
    assume(prompt.count(target) == len(items))
    assume(subject.can_tell(prompt))
    expected = "".join(text for pair in zip(parts, [*items, ""], strict=True) for text in pair)
    updated = subject.apply(subject.ids(prompt), items, PromptReplacement(target))
    assert updated == subject.ids(expected).tolist()


@pytest.mark.long
@unhurried
@given(
    subject=subjects,
    prompt=texts,
    items=st.lists(item_texts, min_size=1, max_size=3),
    position=st.sampled_from([Position.AFTER_PREFIX, Position.END]),
    is_otherwise=st.booleans(),
)
def test_insertion_is_as_if_the_whole_text_had_been_tokenised(
    subject: Subject, prompt: str, items: list[str], position: Position, is_otherwise: bool
) -> None:
    assume(subject.can_tell(prompt))
    inserted = "".join(items)
    expected = prompt + inserted if position is Position.END else inserted + prompt
    update = PromptReplacement(TARGET, otherwise=position) if is_otherwise else PromptInsertion(position)
    assert subject.apply(subject.ids(prompt), items, update) == subject.ids(expected).tolist()


@pytest.mark.long
@unhurried
@given(subject=subjects, prompt=texts, items=st.lists(item_texts, max_size=2), before=texts, after=texts)
def test_frames_are_as_if_the_whole_text_had_been_tokenised(
    subject: Subject, prompt: str, items: list[str], before: str, after: str
) -> None:
    text = TARGET.join(["Q", *["and"] * (len(items) - 1), prompt]) if items else "Q" + prompt
    assume(subject.can_tell(text))
    frame = [FrameInsertion(before, Position.AFTER_PREFIX), FrameInsertion(after, Position.END)]
    expected = before + text + after
    for item in items:
        expected = expected.replace(TARGET, item, 1)
    updated = subject.apply(subject.ids(text), items, PromptReplacement(TARGET), frame)
    assert updated == subject.ids(expected).tolist()


@unhurried
@given(subject=subjects, prompt=texts, number=st.integers(1, 3))
def test_a_prompt_after_bos_is_tokenised_as_no_beginning(subject: Subject, prompt: str, number: int) -> None:
    """What PaliGemma does: the pictures, BOS and only then the text."""
    assume(subject.can_tell(prompt))
    item = START + EMBED + END
    frame = [FrameInsertion(BOS, Position.AFTER_ITEMS), FrameInsertion("\n", Position.END)]
    update = PromptReplacement(TARGET, otherwise=Position.START)
    expected = subject.ids(item * number + BOS + prompt + "\n", special=False).tolist()
    for given_ids in (subject.ids(prompt), subject.ids(prompt, special=False)):
        updated = subject.apply(given_ids, [item] * number, update, frame, keeps_special_tokens=False)
        assert updated == expected


def test_insertion_before_the_beginning_keeps_bos_behind_it(any_subject: Subject) -> None:
    ids = any_subject.ids("Look: a")
    assert ids[0] == any_subject.one(BOS)
    update = PromptInsertion(Position.START, tokenized_apart=True)
    assert any_subject.apply(ids, [EMBED], update) == [any_subject.one(EMBED), *ids.tolist()]


def test_items_apart_from_the_text_leave_it_as_it_begins() -> None:
    """What Fuyu does: BOS goes, but the text is tokenised as one of its own."""
    this = subject("metaspace", "first")
    update = PromptInsertion(Position.START, tokenized_apart=True)
    text = this.ids("Look", special=False).tolist()
    assert this.hf.convert_ids_to_tokens(text)[0].startswith("▁")
    assert this.apply(this.ids("Look"), [EMBED], update, keeps_special_tokens=False) == [this.one(EMBED), *text]


def test_items_before_the_text_make_it_no_beginning() -> None:
    this = subject("metaspace", "first")
    updated = this.apply(this.ids("Look"), [EMBED], PromptInsertion(Position.START), keeps_special_tokens=False)
    assert this.hf.convert_ids_to_tokens(updated[:2]) == [EMBED, "L"]


def test_frame_with_items_only() -> None:
    this = subject()
    frame = [FrameInsertion(END, Position.END, with_items_only=True)]
    update = PromptReplacement(TARGET)
    assert this.apply(this.ids("a"), [], update, frame) == this.ids("a").tolist()
    assert this.apply(this.ids(f"a{TARGET}"), [EMBED], update, frame) == this.ids(f"a{EMBED}{END}").tolist()


def test_frame_unless_there() -> None:
    this = subject(bos=False)
    frame = [FrameInsertion(BOS, Position.START, unless_there=True)]
    update = PromptReplacement(TARGET)
    expected = this.ids(f"{BOS}a{EMBED}").tolist()
    assert this.apply(this.ids(f"a{TARGET}"), [EMBED], update, frame) == expected
    assert this.apply(this.ids(f"{BOS}a{TARGET}"), [EMBED], update, frame) == expected
    assert this.apply(this.ids(TARGET), [EMBED], update, frame) == this.ids(BOS + EMBED).tolist()


def test_frame_behind_bos_when_items_stand_before_it() -> None:
    this = subject()
    frame = [FrameInsertion("Be brief. ", Position.AFTER_PREFIX)]
    updated = this.apply(this.ids("a"), [EMBED], PromptInsertion(Position.START), frame)
    assert updated == [this.one(EMBED), *this.ids("Be brief. a").tolist()]


def test_modalities_are_mixed_in_any_order() -> None:
    this = subject()
    rules = PromptRules({"image": PromptReplacement(TARGET), "video": PromptReplacement(START)})
    items = [("video", this.item(EMBED)), ("image", this.item(EMBED * 2)), ("video", this.item(EMBED * 3))]
    updated, placeholders = apply_updates(this.ids(f"a{START}b{START}c{TARGET}"), items, rules, this.tokenizer)
    assert updated.tolist() == this.ids(f"a{EMBED}b{EMBED * 3}c{EMBED * 2}").tolist()
    by_offset = sorted(zip(placeholders, items, strict=True), key=lambda pair: pair[0].offset)
    assert [item.features.num_embeds for _, (_, item) in by_offset] == [1, 3, 2]


@pytest.mark.parametrize("target", [TARGET, TEXT_TARGET])
@pytest.mark.parametrize(("num_targets", "num_items"), [(0, 1), (1, 0), (1, 2), (3, 2)])
def test_numbers_that_do_not_match(target: str, num_targets: int, num_items: int) -> None:
    this = subject()
    reason = f"the prompt has {num_targets} image placeholders for {num_items} image items"
    with pytest.raises(InvalidRequestError, match=reason):
        this.apply(this.ids(target.join(["a"] * (num_targets + 1))), [EMBED] * num_items, PromptReplacement(target))


def test_a_target_beside_the_expanded_ones_is_one_too_many() -> None:
    this = subject()
    with pytest.raises(InvalidRequestError, match="the prompt has 1 image placeholders for 2 image items"):
        this.apply(this.ids(f"a{EMBED}b{EMBED}c{TARGET}"), [EMBED, EMBED], PromptReplacement(TARGET))


def test_an_expansion_may_hold_its_own_target() -> None:
    this = subject()
    update = PromptReplacement(TARGET)
    item = TARGET + EMBED * 3
    assert this.apply(this.ids(f"a{TARGET}b"), [item], update) == this.ids(f"a{item}b").tolist()


def test_target_of_text_and_tokens_is_refused() -> None:
    this = subject()
    with pytest.raises(ValueError, match="neither text nor tokens but both"):
        this.apply(this.ids("a"), [EMBED], PromptReplacement(f"({TARGET})"))


def spelled(this: Subject, text: str) -> list[int]:
    """The ids of single letters, which no tokenizer makes of a word."""
    return [index for letter in text for index in this.hf(letter, add_special_tokens=False)["input_ids"]]


def test_other_ids_than_the_tokenizers_are_kept() -> None:
    this = subject()
    words = spelled(this, "Describe")
    assert words != this.ids("Describe", special=False).tolist()
    target, embed, bos = this.one(TARGET), this.one(EMBED), this.one(BOS)
    updated = this.apply(token_ids([bos, *words, target, *words]), [EMBED], PromptReplacement(TARGET))
    assert updated == [bos, *words, embed, *words]


def test_other_ids_are_kept_beside_text_too(any_subject: Subject) -> None:
    """They stay apart from the text put beside them, which merges with the rest of its run."""
    this = any_subject
    words = spelled(this, "Describe")
    target, bos = this.one(TARGET), this.one(BOS)
    frame = [FrameInsertion("Be brief. ", Position.AFTER_PREFIX)]
    updated = this.apply(token_ids([bos, *words, target, *words]), [f"\n\n{EMBED}."], PromptReplacement(TARGET), frame)
    first = this.ids("Be brief. ").tolist()
    between = this.ids(f"{EMBED}\n\n{EMBED}.", special=False).tolist()[1:]
    assert updated == [*first, *words, *between, *words]


@unhurried
@given(data=st.data(), subject=subjects)
def test_any_ids_between_targets_are_kept(subject: Subject, data: st.DataObject) -> None:
    taken = {subject.one(token) for token in (EMBED, TARGET)}
    ordinary = st.integers(0, len(subject.hf) - 1).filter(lambda index: index not in taken)
    runs = data.draw(st.lists(st.lists(ordinary, max_size=5), min_size=2, max_size=4))
    prompt = [index for run in runs for index in [*run, subject.one(TARGET)]][:-1]
    expected = [index for run in runs for index in [*run, subject.one(EMBED)]][:-1]
    assert subject.apply(token_ids(prompt), [EMBED] * (len(runs) - 1), PromptReplacement(TARGET)) == expected


class Counting(PromptTokenizer):
    """Counts what it is asked to tokenise or to decode."""

    num_calls = 0
    num_tokens = 0

    def decode_run(self, run: TokenIds, *, is_first: bool) -> str:
        self.num_calls += 1
        self.num_tokens += len(run)
        return super().decode_run(run, is_first=is_first)

    def encode_run(self, text: str, *, is_first: bool) -> TokenIds:
        ids = super().encode_run(text, is_first=is_first)
        self.num_calls += 1
        self.num_tokens += len(ids)
        return ids


@pytest.mark.parametrize("target", [TARGET, TEXT_TARGET])
def test_a_long_prompt_is_tokenised_but_once_around_its_items(target: str) -> None:
    this = subject()
    tokenizer = Counting(this.hf, {EMBED})
    num_tokens = 200_000
    # Boundaries everywhere, and a long run on either side of the item.
    run, broken = this.ids("Describe the image. ", special=False), this.ids(f"a{END}", special=False)
    half = np.resize(run, num_tokens // 4)
    ids = np.concatenate([np.resize(broken, num_tokens // 2), half, this.ids(f" {target} ", special=False), half])
    items = [("image", this.item(f"\n{EMBED}\n"))]
    updated, _ = apply_updates(ids, items, PromptRules({"image": PromptReplacement(target)}), tokenizer)
    assert len(updated) > num_tokens
    assert updated[: num_tokens // 2].tolist() == ids[: num_tokens // 2].tolist()
    # A target that is text is looked for in every run.
    assert tokenizer.num_calls <= (10 if target == TARGET else num_tokens // 4 + 10)
    assert tokenizer.num_tokens <= 4 * num_tokens


@pytest.mark.long
def test_many_targets_and_runs_take_their_time_only_once() -> None:
    this = subject()
    num_items = 20_000
    ids = this.ids(f"a{TARGET}" * num_items)
    item = this.item(EMBED)
    rules = PromptRules({"image": PromptReplacement(TARGET)})
    updated, placeholders = apply_updates(ids, [("image", item)] * num_items, rules, this.tokenizer)
    assert updated.tolist() == this.ids(f"a{EMBED}" * num_items).tolist()
    assert len(placeholders) == num_items
