"""Blocks are handed out and taken back, none lost, none doubled."""

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.llm.block_manager import BlockManager
from raylens.llm.sequence import PromptItem, Sequence
from raylens.llm.states.state_slots import StateSlots


def sequence(name: str = "s") -> Sequence:
    return Sequence(name, [1], 1, [], 100)


def prompt(ids: list[int], *, name: str = "s", root: bytes = b"", items: Seq[tuple[str, Seq[int]]] = ()) -> Sequence:
    made = [PromptItem(mm_hash, positions, None) for mm_hash, positions in items]
    return Sequence(name, ids, len(ids), made, 100, prefix_root=root)


def test_blocks_cover_the_tokens() -> None:
    manager, one = BlockManager(4, block_size=16), sequence()
    for num_tokens, num_blocks in ((1, 1), (16, 1), (17, 2), (64, 4)):
        manager.allocate(one, num_tokens)
        assert len(one.block_table) == num_blocks
    assert manager.usage == 1
    assert not manager.allocate(one, 65)
    assert len(one.block_table) == 4
    manager.free(one)
    assert (manager.usage, one.block_table, one.num_computed_tokens) == (0, [], 0)


def test_guesses_take_free_slots_and_leave_the_state_after_the_last_right_one() -> None:
    manager = BlockManager(8, block_size=4, states=StateSlots(4, 0, block_size=4))
    one, other = sequences = [sequence("one"), sequence("other")]
    for own in sequences:
        manager.take_prefix(own)
    assert manager.allocate_draft(one, 1, 2)
    assert not manager.allocate_draft(other, 1, 1)
    after_first, after_second = one.draft_slots
    manager.check_integrity(sequences)
    manager.note_accepted(one, 2)
    manager.end_draft(one)
    assert (one.state_slot, one.state_source, one.draft_slots) == (after_first, after_first, [])
    manager.check_integrity(sequences)
    assert manager.allocate_draft(other, 1, 2)
    assert after_second in other.draft_slots
    manager.free(other)
    manager.check_integrity(sequences)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 80)), max_size=40))
def test_no_block_is_lost_or_doubled(steps: list[tuple[int, int]]) -> None:
    """Four sequences of one beginning, or of two, are begun, grown, computed and freed."""
    manager = BlockManager(8, block_size=16)
    sequences = [prompt([1] * 80, name=str(i), root=bytes([i % 2])) for i in range(4)]
    for index, num_tokens in steps:
        one = sequences[index]
        if num_tokens == -1:
            manager.free(one)
        elif not one.block_table and manager.can_start(one):
            manager.take_prefix(one)
        elif manager.allocate(one, num_tokens):
            compute(manager, one, max(num_tokens, one.num_computed_tokens))
        manager.check_integrity(sequences)


def compute(manager: BlockManager, one: Sequence, num_tokens: int) -> None:
    manager.allocate(one, num_tokens)
    one.num_computed_tokens = num_tokens
    manager.commit(one)


def num_found(manager: BlockManager, one: Sequence) -> int:
    """Positions of the sequence's beginning that the prefix cache holds."""
    manager.take_prefix(one)
    num_tokens = one.num_computed_tokens
    manager.free(one)
    return num_tokens


IDS = list(range(40))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [(IDS, 32), (IDS[:33], 32), (IDS[:32], 16), ([*IDS[:20], 99], 16), ([99, *IDS], 0), ([*IDS, 99], 32)],
)
def test_the_longest_common_beginning_is_found_and_one_token_left(ids: list[int], expected: int) -> None:
    manager = BlockManager(8, block_size=16)
    compute(manager, prompt(IDS), 40)
    assert num_found(manager, prompt(ids)) == expected


def test_what_is_not_computed_yet_is_not_found() -> None:
    manager = BlockManager(8, block_size=16)
    one = prompt(IDS)
    manager.allocate(one, 40)
    compute(manager, one, 20)
    assert num_found(manager, prompt(IDS)) == 16


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, 32),
        ({"items": [("a", range(8, 20))], "root": b"other tenant"}, 0),
        ({"items": [("b", range(8, 20))]}, 0),
        ({"items": [("a", range(9, 21))]}, 0),
        ({"items": [("a", range(8, 20)), ("b", range(21, 22))]}, 16),
        ({"items": []}, 0),
    ],
)
def test_items_and_tenant_are_part_of_the_content(other: dict[str, Any], expected: int) -> None:
    manager = BlockManager(8, block_size=16)
    settings: dict[str, Any] = {"items": [("a", range(8, 20))], "root": b"tenant"}
    compute(manager, prompt(IDS, **settings), 40)
    assert num_found(manager, prompt(IDS, **(settings | other))) == expected


def test_the_gap_of_an_item_belongs_to_it() -> None:
    """A block between two embeddings of one item, which may attend to both of them."""
    manager = BlockManager(8, block_size=16)
    compute(manager, prompt(IDS, items=[("a", (2, 39))]), 40)
    assert num_found(manager, prompt(IDS, items=[("b", (2, 39))])) == 0


def test_freed_content_is_found_until_its_block_is_needed() -> None:
    manager = BlockManager(4, block_size=16)
    old, new, junk = prompt(IDS, name="old"), prompt([7] * 40, name="new"), prompt([8] * 40, name="junk")
    manager.allocate(junk, 32)
    compute(manager, old, 32)
    manager.free(old)
    manager.free(junk)
    compute(manager, new, 32)
    assert num_found(manager, prompt(IDS)) == 32  # free blocks without content are used first
    manager.allocate(new, 48)
    assert num_found(manager, prompt(IDS)) == 16  # the end goes before the beginning
    manager.allocate(new, 64)
    assert num_found(manager, prompt(IDS)) == 0


def test_a_shared_block_is_free_when_the_last_has_left() -> None:
    manager = BlockManager(4, block_size=16)
    first, second = prompt(IDS, name="first"), prompt(IDS, name="second")
    compute(manager, first, 40)
    manager.take_prefix(second)
    manager.allocate(second, 40)
    assert manager.num_free_blocks == 0
    manager.free(first)
    assert manager.num_free_blocks == 1
    manager.check_integrity([second])
    manager.free(second)
    assert manager.num_free_blocks == 4


def test_whether_a_sequence_fits_counts_what_it_finds() -> None:
    manager = BlockManager(4, block_size=16)
    first, other = prompt(IDS, name="first"), prompt([7] * 40, name="other")
    compute(manager, first, 40)
    assert manager.can_start(prompt(IDS))  # two blocks are shared, one is free
    assert not manager.can_start(other)
    manager.free(first)
    manager.allocate(other, 32)
    assert not manager.can_start(prompt([*IDS, *IDS]))  # found blocks that are free are no further room


def test_untrusted_content_is_not_found() -> None:
    manager = BlockManager(8, block_size=16)
    one = prompt(IDS)
    compute(manager, one, 40)
    manager.disown(one)
    manager.free(one)
    assert num_found(manager, prompt(IDS)) == 0


def test_the_integrity_check_sees_a_lost_block() -> None:
    manager, one = BlockManager(4, block_size=16), sequence()
    manager.allocate(one, 20)
    one.block_table.pop()
    with pytest.raises(RuntimeError, match="lost or doubled"):
        manager.check_integrity([one])


def stretches(one: Sequence) -> int:
    """How many rows of blocks that follow each other a sequence has."""
    pairs = zip(one.block_table, one.block_table[1:], strict=False)
    return 1 + sum(after != before + 1 for before, after in pairs)


def test_sequences_that_grow_beside_each_other_stay_in_one_piece() -> None:
    manager = BlockManager(256, block_size=16)
    sequences = [prompt([1] * 500, name=str(i), root=bytes([i])) for i in range(8)]
    for one in sequences:
        manager.allocate(one, 128)
    for num_tokens in range(129, 193):
        for one in sequences:
            manager.allocate(one, num_tokens)
    assert [stretches(one) for one in sequences] == [1] * 8


def test_a_prompt_lies_in_few_pieces_when_it_takes_the_place_of_cached_ones() -> None:
    manager = BlockManager(64, block_size=16)
    for i in range(4):
        old = prompt([i] * 256, root=bytes([i]))
        compute(manager, old, 256)
        manager.free(old)
    new = prompt([9] * 300, root=b"new")
    manager.allocate(new, 300)
    assert stretches(new) == 2
