"""Blocks are handed out and taken back, none lost, none doubled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.block_manager import BlockManager
from llm.sampling_params import SamplingParams
from llm.sequence import Sequence


def sequence(name: str = "s") -> Sequence:
    return Sequence(name, [1], 1, [], SamplingParams(), 100)


def test_blocks_cover_the_tokens() -> None:
    manager, one = BlockManager(4, block_size=16), sequence()
    for num_tokens, num_blocks in ((1, 1), (16, 1), (17, 2), (64, 4)):
        manager.allocate(one, num_tokens)
        assert len(one.block_table) == num_blocks
    assert manager.usage == 1
    assert not manager.can_allocate(one, 65)
    manager.free(one)
    assert (manager.usage, one.block_table, one.num_computed_tokens) == (0, [], 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 80)), max_size=40))
def test_no_block_is_lost_or_doubled(steps: list[tuple[int, int]]) -> None:
    manager, sequences = BlockManager(8, block_size=16), [sequence(str(i)) for i in range(4)]
    for index, num_tokens in steps:
        if num_tokens == 0:
            manager.free(sequences[index])
        elif manager.can_allocate(sequences[index], num_tokens):
            manager.allocate(sequences[index], num_tokens)
        manager.check_integrity(sequences)


def test_the_integrity_check_sees_a_lost_block() -> None:
    manager, one = BlockManager(4, block_size=16), sequence()
    manager.allocate(one, 20)
    one.block_table.pop()
    with pytest.raises(RuntimeError, match="lost or doubled"):
        manager.check_integrity([one])
