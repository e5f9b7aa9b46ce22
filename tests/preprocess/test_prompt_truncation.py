"""Prompts with pictures between their texts, and prompts cut from the left."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.modeling.families import known_to, load_family
from raylens.preprocess.prompt_tokenizer import token_ids
from raylens.preprocess.prompt_truncation import Extent, truncate_left
from raylens.preprocess.schema import (
    InterleavedPrompt,
    InvalidRequestError,
    PlaceholderRange,
    PromptTruncation,
    TextPrompt,
)
from tests.preprocess.parity import Pair, pair

TEXTS = ["Look at this: ", " and that ", ", what is it?\n"]
PICTURES = [0, 1]


@pytest.fixture(params=sorted({*known_to("preprocess")} - {"florence2"}))
def families(request: pytest.FixtureRequest) -> Pair:
    model_type: str = request.param
    return pair(model_type, "byte_level", load_family("preprocess", model_type).backends[0])


def texts_and_pictures(families: Pair) -> tuple[list[str], list[int]]:
    most = families.family.modalities["image"].max_items or len(PICTURES)
    return [families.opening + TEXTS[0], *TEXTS[1 : most + 1]], PICTURES[:most]


def test_pictures_between_texts_get_the_models_own_placeholders_and_marks(families: Pair) -> None:
    texts, pictures = texts_and_pictures(families)
    infos = [info for info, _ in families.items(pictures)]
    parts: list[str | None] = [texts[0]]
    for text in texts[1:]:
        parts += [None, text]
    prompt = families.ours.prompts.render(InterleavedPrompt(parts), infos, ["h"] * len(infos))
    before, after = families.family.modalities["image"].marks
    bare = families.placeholder.removeprefix(before).removesuffix(after)
    outputs = families.one_shot((before + bare + after).join(texts), pictures)
    expected = families.as_rendered(outputs["input_ids"][0].tolist())
    assert prompt.prompt_token_ids == expected, families.difference(prompt.prompt_token_ids, expected)


def test_a_cut_prompt_is_the_end_of_the_whole_one_with_whole_pictures(families: Pair) -> None:
    texts, pictures = texts_and_pictures(families)
    infos = [info for info, _ in families.items(pictures)]
    hashes = [f"picture {index}" for index in pictures]
    text = families.placeholder.join(texts)
    whole = families.ours.prompts.render(TextPrompt(text), infos, hashes)
    tokenizer = families.theirs.tokenizer
    marks = set(tokenizer.convert_tokens_to_ids(list(families.family.modalities["image"].marks)))
    for limit in range(1, len(whole.prompt_token_ids) + 2):
        try:
            cut = families.ours.prompts.render(TextPrompt(text), infos, hashes, truncation=PromptTruncation(limit))
        except InvalidRequestError:
            # A model that takes no text alone is left with none of its pictures.
            assert families.family.requires_items
            continue
        num_cut = len(whole.prompt_token_ids) - len(cut.prompt_token_ids)
        assert cut.prompt_token_ids == whole.prompt_token_ids[num_cut:]
        assert len(cut.prompt_token_ids) <= limit
        kept = range(len(infos)) if cut.item_order is None else cut.item_order
        assert cut.mm_hashes == [hashes[index] for index in kept]
        families.check_placeholders(cut, infos)
        if families.model_type.startswith("qwen"):
            assert sum(token in marks for token in cut.prompt_token_ids) == 2 * len(kept)


@pytest.mark.long
def test_a_negative_limit_leaves_so_many_tokens_of_the_context() -> None:
    families = pair("llava", "byte_level", "pil")
    text = "word " * families.ours.max_model_len
    cut = families.ours.prompts.render(TextPrompt(text), [], [], truncation=PromptTruncation(num_answer_tokens=100))
    assert len(cut.prompt_token_ids) == families.ours.max_model_len - 100
    with pytest.raises(InvalidRequestError, match=r"prompt: .* leaves no room for an answer"):
        families.ours.prompts.render(TextPrompt(text), [], [])


@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=5),
    rest=st.integers(0, 3),
    limit=st.integers(0, 40),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_items_stay_whole_wherever_the_cut_falls(
    lengths: list[tuple[int, int]], rest: int, limit: int, order: random.Random
) -> None:
    ids, extents = [], []
    for index, (gap, length) in enumerate(lengths, start=1):
        ids += [0] * gap + [index] * length
        extents.append(Extent(len(ids) - length, len(ids)))
    ids += [0] * rest
    order.shuffle(extents)
    placeholders = [PlaceholderRange(extent.start, extent.end - extent.start) for extent in extents]
    cut, found, kept = truncate_left(token_ids(ids), placeholders, extents, limit)
    assert cut.tolist() == ids[len(ids) - len(cut) :]
    assert len(cut) <= limit or limit >= len(ids)
    for index, placeholder in zip(kept, found, strict=True):
        inside = cut[placeholder.offset : placeholder.offset + placeholder.length]
        assert set(inside.tolist()) == {ids[extents[index].start]}
    # Nothing of the others is left, and no item went that had room.
    assert sorted({int(one) for one in cut} - {0}) == sorted(ids[extents[index].start] for index in kept)
    assert all(index in kept for index, extent in enumerate(extents) if extent.start >= len(ids) - limit)


@pytest.mark.parametrize(("limit", "kept"), [(7, [0, 1]), (6, []), (4, []), (1, [])])
def test_two_items_whose_marks_share_a_token_go_together(limit: int, kept: list[int]) -> None:
    """As the end of one and the beginning of the next in plain text: `><`."""
    ids = token_ids([5, 10, 6, 7, 11, 8, 9])
    placeholders = [PlaceholderRange(1, 1), PlaceholderRange(4, 1)]
    extents = [Extent(0, 4), Extent(3, 6)]
    cut, found, indices = truncate_left(ids, placeholders, extents[::-1], limit)
    assert (indices, len(found)) == (kept, len(kept))
    assert cut.tolist() == (ids.tolist() if kept else [9])
