"""A step's chunks become rows: each token, position and embedding where it belongs."""

import numpy as np
import torch

from raylens.llm.prompt_layout import BidirectionalSpan, PromptLayout
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import PromptItem, Sequence
from raylens.llm.step_input import StepBuilder, StepInput

IMAGE = 999


def build(chunks: list[ScheduledChunk], *, num_rope_axes: int = 1, keeps_tokens: bool = False) -> StepInput:
    return StepBuilder(
        max_num_tokens=32,
        block_size=4,
        num_rope_axes=num_rope_axes,
        keeps_tokens=keeps_tokens,
    ).build(chunks)


def prompt(num_tokens: int, **settings: object) -> Sequence:
    return Sequence("a", list(range(num_tokens)), num_tokens, [], 100, block_table=[7, 3, 5], **settings)  # type: ignore[arg-type]


def test_chunks_lie_one_behind_the_other() -> None:
    decoding = prompt(5)
    decoding.append_token(60)
    decoding.num_computed_tokens = 5
    cut, ending = prompt(10), prompt(9, num_computed_tokens=6)
    step = build([ScheduledChunk(decoding, 1), ScheduledChunk(cut, 3), ScheduledChunk(ending, 3)])
    assert step.token_ids.tolist() == [60, 0, 1, 2, 6, 7, 8]
    assert step.positions.tolist() == [[5, 0, 1, 2, 6, 7, 8]]
    assert step.slot_mapping.tolist() == [13, 28, 29, 30, 14, 15, 20]
    assert step.logits_rows.tolist() == [0, 6]
    assert (step.query_lengths, step.context_lengths, step.num_decodes) == ([1, 3, 3], [6, 3, 9], 1)


def test_pending_tokens_are_fed_where_the_device_has_them() -> None:
    """Three decode, two of them behind a token that nobody has read; a prompt follows."""
    decoding = [prompt(5) for _ in range(3)]
    for one in decoding:
        one.num_computed_tokens = 5
    decoding[0].add_pending_token(row=2)
    decoding[1].append_token(60)
    decoding[2].add_pending_token(row=0)
    builder = StepBuilder(max_num_tokens=32, block_size=4, num_rope_axes=1, keeps_tokens=False)
    chosen = torch.tensor([70, 71, 72])
    chunks = [*(ScheduledChunk(one, 1) for one in decoding), ScheduledChunk(prompt(3), 3)]
    step = builder.build(chunks, chosen)
    assert step.token_ids.tolist() == [0, 60, 0, 0, 1, 2]
    assert step.positions.tolist() == [[5, 5, 5, 0, 1, 2]]
    fed = step.to(torch.device("cpu"))
    builder.build([ScheduledChunk(prompt(6), 6)])  # the next step takes the same memory
    assert fed.token_ids.tolist() == [72, 60, 70, 0, 1, 2]
    assert (fed.slot_mapping.tolist(), fed.logits_rows.tolist()) == ([13, 13, 13, 28, 29, 30], [0, 1, 2, 5])
    assert fed.fed is None


def test_items_that_alternate_are_put_in_order() -> None:
    items = [PromptItem("h", (0, 2), torch.tensor([[0.0, 0], [2, 2]])), PromptItem("i", (1, 3), torch.ones(2, 2))]
    one = Sequence("a", [IMAGE] * 4 + [5], 5, items, 100, block_table=[0, 1])
    step = build([ScheduledChunk(one, 5)])
    assert step.token_ids.tolist() == [0, 0, 0, 0, 5]
    assert step.embed_rows.tolist() == [0, 1, 2, 3]
    assert torch.cat(step.embeds)[:, 0].tolist() == [0, 1, 2, 1]
    assert build([ScheduledChunk(one, 5)], keeps_tokens=True).token_ids.tolist() == [IMAGE] * 4 + [5]


def test_embeddings_of_items_one_behind_the_other_are_not_copied() -> None:
    items = [PromptItem("h", (0, 1), torch.zeros(2, 2)), PromptItem("i", (3, 4, 5), torch.ones(3, 2))]
    one = Sequence("a", [IMAGE] * 7, 7, items, 100, block_table=[0, 1])
    step = build([ScheduledChunk(one, 5)])
    assert step.embed_rows.tolist() == [0, 1, 3, 4]
    assert [piece.data_ptr() for piece in step.embeds] == [
        item.embeddings.data_ptr() for item in items if item.embeddings is not None
    ]
    assert list(map(len, step.embeds)) == [2, 2]


def test_positions_of_several_axes_go_on_behind_the_prompt() -> None:
    layout = PromptLayout(rope_positions=np.array([[0, 1, 1], [0, 1, 2], [0, 3, 1]]), rope_offsets=(-1, 0, -1))
    one = prompt(3, layout=layout)
    assert build([ScheduledChunk(one, 3)], num_rope_axes=3).positions.tolist() == [[0, 1, 1], [0, 1, 2], [0, 3, 1]]
    one.append_token(4)
    one.num_computed_tokens = 3
    assert build([ScheduledChunk(one, 1)], num_rope_axes=3).positions.tolist() == [[2], [3], [2]]


def test_spans_are_told_with_their_chunks() -> None:
    spans = (BidirectionalSpan.of([1, 3]), BidirectionalSpan.of([5, 6]))
    step = build([ScheduledChunk(prompt(2), 2), ScheduledChunk(prompt(9, layout=PromptLayout(spans=spans)), 9)])
    assert step.spans_of(0) == []
    assert step.spans_of(1) == [BidirectionalSpan.of([1, 3]), BidirectionalSpan.of([5, 6])]
    later = prompt(9, layout=PromptLayout(spans=spans), num_computed_tokens=4)
    assert build([ScheduledChunk(later, 5)]).spans_of(0) == [BidirectionalSpan.of([5, 6])]


def test_each_token_of_a_prompt_is_scored_once_by_the_one_before() -> None:
    one = prompt(9, num_prompt_logprobs=2, num_computed_tokens=2, num_scored_tokens=4)
    step = build([ScheduledChunk(prompt(2), 2), ScheduledChunk(one, 7)])
    assert step.scored == [(row, token, 2) for row, token in ((4, 5), (5, 6), (6, 7), (7, 8))]
    assert build([ScheduledChunk(prompt(9), 9)]).scored == []
