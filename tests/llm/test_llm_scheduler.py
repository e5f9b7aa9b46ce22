"""The scheduler without a model: budgets, fairness, preemption, and that everything ends."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raylens.llm.block_manager import BlockManager
from raylens.llm.prompt_layout import BidirectionalSpan, PromptLayout
from raylens.llm.scheduler import ScheduledChunk, Scheduler
from raylens.llm.sequence import FinishReason, PromptItem, Sequence

BLOCK_SIZE = 4


def sequence(name: str, num_prompt_tokens: int, num_output_tokens: int, **settings: Any) -> Sequence:
    """Its prompt is shared with nobody unless `prefix_root` says so."""
    made = Sequence(name, [0] * num_prompt_tokens, num_prompt_tokens, [], num_prompt_tokens + num_output_tokens)
    return replace(made, **{"prefix_root": name.encode(), **settings})


def make(num_blocks: int = 100, max_num_seqs: int = 8, budget: int = 16, **settings: Any) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, BLOCK_SIZE), max_num_seqs, budget, **settings)


def by_arrival(**settings: Any) -> Scheduler:
    """One in which prompts share no step unless tokens are left."""
    return make(short_prompt_share=0.0, **settings)


def run_step(scheduler: Scheduler) -> list[ScheduledChunk]:
    """What the engine does around the model: advance, append a token where one is sampled, end."""
    chunks = scheduler.schedule()
    sampling = [chunk.sequence for chunk in chunks if chunk.samples]
    for chunk in chunks:
        chunk.sequence.num_computed_tokens += chunk.num_tokens
        scheduler._block_manager.commit(chunk.sequence)
    for sampled in sampling:
        sampled.append_token(1)
        if sampled.num_tokens >= sampled.max_num_tokens:
            scheduler.finish(sampled, FinishReason.LENGTH)
    return chunks


class Ahead:
    """What the engine does with asynchronous scheduling: it reads a step's tokens when the next one is launched."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.pending: list[Sequence] = []

    def run_step(self) -> list[ScheduledChunk]:
        chunks = self._scheduler.schedule()
        before, self.pending = self.pending, [chunk.sequence for chunk in chunks if chunk.samples]
        for chunk in chunks:
            is_known = chunk.end <= len(chunk.sequence.token_ids)
            assert is_known or chunk.decodes, "only a decode chunk can take its token from the device"
            self._scheduler._block_manager.note_computed(chunk.sequence, chunk.end)
        for sampled in self.pending:
            sampled.add_pending_token(row=0)
        for sampled in before:
            sampled.num_pending_tokens -= 1
            if not sampled.is_finished:
                self._append(sampled)
        return chunks

    def _append(self, sampled: Sequence) -> None:
        sampled.append_token(1)
        if len(sampled.token_ids) >= sampled.max_num_tokens:
            self._scheduler.finish(sampled, FinishReason.LENGTH)
        else:
            self._scheduler._block_manager.note_known(sampled)


def sizes(chunks: list[ScheduledChunk]) -> dict[str, int]:
    return {chunk.sequence.request_id: chunk.num_tokens for chunk in chunks}


def test_a_long_prompt_is_prefilled_in_equal_chunks() -> None:
    scheduler = make(budget=16)
    scheduler.add(sequence("a", 40, 1))
    assert [sizes(run_step(scheduler)) for _ in range(3)] == [{"a": 14}, {"a": 13}, {"a": 13}]
    assert not scheduler.has_unfinished()


def test_running_streams_decode_while_a_long_prompt_is_prefilled() -> None:
    scheduler = make(budget=16)
    scheduler.add(sequence("stream", 4, 50))
    run_step(scheduler)
    scheduler.add(sequence("long", 100, 1))
    for _ in range(6):
        chunks = run_step(scheduler)
        assert sizes(chunks) == {"stream": 1, "long": 15}
        assert chunks[0].sequence.request_id == "stream"


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(sequence(name, 1, 2))
    assert sizes(run_step(scheduler)) == {"a": 1, "b": 1}
    run_step(scheduler)
    assert sizes(run_step(scheduler)) == {"c": 1}


def test_the_youngest_is_preempted_and_recomputed() -> None:
    scheduler = make(num_blocks=4, budget=16)
    old, young = sequence("old", 8, 6), sequence("young", 7, 6)
    scheduler.add(old)
    scheduler.add(young)
    order = []
    while scheduler.has_unfinished():
        run_step(scheduler)
        order += [one.request_id for one in (old, young) if one.is_finished and one.request_id not in order]
    assert order == ["old", "young"]
    assert scheduler.num_preemptions > 0
    assert (old.num_output_tokens, young.num_output_tokens) == (6, 6)


def test_lower_priorities_start_first_and_are_prefilled_first() -> None:
    scheduler = make(max_num_seqs=2, budget=16)
    for name, priority in (("late", 5), ("soon", 1), ("now", 0), ("now, too", 0)):
        scheduler.add(sequence(name, 20, 1, priority=priority))
    order = []
    while scheduler.has_unfinished():
        order += [chunk.sequence.request_id for chunk in run_step(scheduler) if chunk.samples]
    assert order == ["now", "now, too", "soon", "late"]


def test_the_least_urgent_is_preempted_however_old() -> None:
    scheduler = make(num_blocks=4, budget=16)
    patient, urgent = sequence("patient", 8, 6, priority=1), sequence("urgent", 7, 6)
    scheduler.add(patient)
    scheduler.add(urgent)
    waiting = sequence("waiting", 4, 1, priority=1)
    scheduler.add(waiting)
    while not urgent.is_finished:
        run_step(scheduler)
    assert scheduler.num_preemptions > 0
    assert not patient.is_finished
    assert list(scheduler.waiting) == [patient, waiting]


def test_a_sequence_whose_last_token_is_pending_is_not_scheduled() -> None:
    scheduler = make()
    ahead, one = Ahead(scheduler), sequence("one", 4, 3)
    scheduler.add(one)
    assert [sizes(ahead.run_step()) for _ in range(4)] == [{"one": 4}, {"one": 1}, {"one": 1}, {}]
    assert (one.is_finished, one.num_output_tokens) == (True, 3)


def test_blocks_have_names_as_far_as_tokens_are_known() -> None:
    scheduler = make()
    ahead, one = Ahead(scheduler), sequence("one", 6, 9)
    scheduler.add(one)
    known_and_named = []
    for _ in range(6):
        ahead.run_step()
        assert one.num_tokens - len(one.token_ids) == 1
        named = [scheduler._block_manager._hash_of[block_id] is not None for block_id in one.block_table]
        known_and_named.append((len(one.token_ids), sum(named)))
    assert known_and_named == [(6, 1), (7, 1), (8, 2), (9, 2), (10, 2), (11, 2)]


def test_nobody_overtakes_one_that_was_preempted_with_its_first_token_pending() -> None:
    scheduler = make(num_blocks=4, budget=16)
    ahead, old, young, later = Ahead(scheduler), sequence("old", 8, 3), sequence("young", 4, 9), sequence("later", 3, 1)
    scheduler.add(old)
    scheduler.add(young)
    ahead.run_step()
    scheduler.add(later)
    assert sizes(ahead.run_step()) == {"old": 1}
    assert list(scheduler.waiting) == [young, later]
    assert (young.num_output_tokens, young.num_pending_tokens) == (1, 0)
    while scheduler.has_unfinished():
        ahead.run_step()
    assert (old.num_output_tokens, young.num_output_tokens, later.num_output_tokens) == (3, 9, 1)


@dataclass(frozen=True)
class Arrival:
    """A request of a random run: times are steps."""

    at: int
    num_prompt_tokens: int
    num_output_tokens: int
    root: bytes
    item_at: int | None
    item_after: int
    span: int
    num_answers: int
    aborted_after: int | None
    priority: int
    tenant: str


ARRIVALS = st.builds(
    Arrival,
    at=st.integers(0, 5),
    num_prompt_tokens=st.integers(1, 30),
    num_output_tokens=st.integers(1, 10),
    root=st.sampled_from([b"a", b"b"]),
    item_at=st.none() | st.integers(0, 29),
    item_after=st.integers(0, 12),
    span=st.integers(1, 30),
    num_answers=st.sampled_from([1, 1, 1, 3]),
    aborted_after=st.none() | st.none() | st.integers(0, 20),
    priority=st.integers(0, 2),
    tenant=st.sampled_from(["", "", "other"]),
)


def answers(name: str, arrival: Arrival) -> list[Sequence]:
    """An item, if there is one, comes late, and is a span of positions that see each other."""
    items: list[PromptItem] = []
    spans: tuple[BidirectionalSpan, ...] = ()
    if arrival.item_at is not None and arrival.item_at < arrival.num_prompt_tokens:
        end = min(arrival.item_at + arrival.span, arrival.num_prompt_tokens)
        items = [PromptItem("hash", range(arrival.item_at, end), None)]
        spans = (BidirectionalSpan(arrival.item_at, end, range(arrival.item_at, end)),)
    first = sequence(name, arrival.num_prompt_tokens, arrival.num_output_tokens, prefix_root=arrival.root)
    first.priority, first.tenant = arrival.priority, arrival.tenant
    first = replace(first, items=items, layout=PromptLayout(spans=spans))
    copies = [replace(first, token_ids=[*first.token_ids], block_table=[], block_hashes=[]) for _ in range(2)]
    return [first, *(replace(copy, parent=first) for copy in copies)][: arrival.num_answers]


def text(num_prompt_tokens: int, num_output_tokens: int, tenant: str = "", **more: Any) -> Arrival:
    settings: dict[str, Any] = {"at": 0, "root": b"a", "item_at": None, "item_after": 0, "span": 1, "num_answers": 1}
    settings |= {"aborted_after": None, "priority": 0, "tenant": tenant}
    return Arrival(num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens, **(settings | more))


FULL_CACHE_BESIDE_A_TENANT = [
    *(text(1, 1), text(1, 5, "other"), text(9, 4), text(1, 1), text(1, 1), text(1, 1), text(1, 1), text(1, 5)),
    *(
        text(2, 5, num_answers=3),
        text(4, 10, "other"),
        text(8, 9, "other", root=b"b"),
        text(25, 9, "other", priority=1),
    ),
]
"""The only sequence that its tenant's turn lets decode finds no block, and is itself the one to preempt."""


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=12),
    num_blocks=st.integers(10, 30),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(13, 40),
    is_ahead=st.booleans(),
)
@example(arrivals=FULL_CACHE_BESIDE_A_TENANT, num_blocks=12, max_num_seqs=4, budget=13, is_ahead=False)
def test_everything_ends_within_budget(
    arrivals: list[Arrival], num_blocks: int, max_num_seqs: int, budget: int, is_ahead: bool
) -> None:
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(manager, max_num_seqs, budget)
    ahead = Ahead(scheduler)
    requests = [(arrival, answers(str(i), arrival)) for i, arrival in enumerate(arrivals)]
    sequences = [one for _, group in requests for one in group]
    for step in range(2000):
        for arrival, group in requests:
            if arrival.at == step:
                for one in group:
                    scheduler.add(one)
            if arrival.at + arrival.item_after == step:
                for item in group[0].items:
                    item.embeddings = torch.empty(len(item.positions), 1)
            if arrival.aborted_after is not None and arrival.at + arrival.aborted_after == step:
                for one in group:
                    if not one.is_finished:
                        scheduler.finish(one, FinishReason.ABORT)
        if step > 25 and not scheduler.has_unfinished():
            break
        awaits_tokens = bool(ahead.pending)
        chunks = ahead.run_step() if is_ahead else run_step(scheduler)
        assert chunks or step <= 25 or awaits_tokens or not scheduler.has_unfinished()
        if sum(chunk.num_tokens for chunk in chunks) > budget:
            longer = [chunk for chunk in chunks if chunk.num_tokens > 1]
            assert len(longer) == 1, "a span that is longer than the budget goes alone"
            assert any(longer[0].end == span.end for span in longer[0].sequence.layout.spans)
        assert len(scheduler.running) <= max_num_seqs
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        decoding = [chunk.num_tokens == 1 for chunk in chunks[: scheduler.num_decodes]]
        assert all(decoding), "decode chunks come first"
        manager.check_integrity(sequences)
    assert all(one.is_finished for one in sequences)
    assert manager.num_free_blocks == num_blocks
    for arrival, group in requests:
        complete = [one for one in group if one.finish_reason is FinishReason.LENGTH]
        assert arrival.aborted_after is not None or len(complete) == arrival.num_answers


def waits_for_item(name: str, num_prompt_tokens: int, positions: range, **settings: Any) -> Sequence:
    item = PromptItem("hash", positions, None)
    return sequence(name, num_prompt_tokens, 5, items=[item], **settings)


def test_a_prompt_is_computed_up_to_the_first_item_that_has_not_arrived() -> None:
    scheduler = make(budget=40)
    one = waits_for_item("one", 90, range(80, 84))
    scheduler.add(one)
    assert [sizes(run_step(scheduler)) for _ in range(3)] == [{"one": 40}, {"one": 40}, {}]
    scheduler.add(sequence("other", 4, 1))
    assert sizes(run_step(scheduler)) == {"other": 4}
    one.items[0].embeddings = torch.empty(4, 1)
    assert sizes(run_step(scheduler)) == {"one": 10}


@pytest.mark.parametrize(("num_before", "is_worth_it"), [(31, False), (32, True)])
def test_a_few_tokens_before_an_item_that_has_not_arrived_wait_with_it(num_before: int, is_worth_it: bool) -> None:
    scheduler = make(budget=100)
    one = waits_for_item("one", 60, range(num_before, num_before + 4))
    scheduler.add(one)
    scheduler.add(sequence("other", 4, 1))
    first = {"one": num_before, "other": 4} if is_worth_it else {"other": 4}
    assert sizes(run_step(scheduler)) == first
    one.items[0].embeddings = torch.empty(4, 1)
    assert sizes(run_step(scheduler)) == {"one": 60 - num_before if is_worth_it else 60}


def test_nobody_waits_behind_one_whose_item_comes_first() -> None:
    scheduler = make(budget=16)
    scheduler.add(waits_for_item("one", 30, range(4)))
    scheduler.add(sequence("other", 4, 1))
    assert sizes(run_step(scheduler)) == {"other": 4}


def test_an_answer_waits_for_items_that_the_prefix_cache_has_made_up_for() -> None:
    """They may still fail, and a preemption would need them."""
    scheduler = make()
    first = sequence("first", 9, 1, prefix_root=b"shared", items=[PromptItem("hash", range(4, 6), torch.zeros(2, 1))])
    scheduler.add(first)
    run_step(scheduler)
    assert first.is_finished
    item = PromptItem("hash", range(4, 6), None)
    again = sequence("again", 9, 2, prefix_root=b"shared", items=[item])
    scheduler.add(again)
    run_step(scheduler)
    assert run_step(scheduler) == []
    assert again.num_output_tokens == 0
    item.embeddings = torch.zeros(2, 1)
    (chunk,) = run_step(scheduler)
    assert (chunk.start, chunk.num_tokens, chunk.samples) == (8, 1, True)


def test_those_that_wait_for_items_leave_places_to_others() -> None:
    scheduler = make(max_num_seqs=4, budget=80)
    items = [PromptItem("hash", range(34, 36), None) for _ in range(6)]
    with_items = [sequence(f"item {index}", 38, 1, items=[item]) for index, item in enumerate(items)]
    others = [sequence(f"text {index}", 4, 1) for index in range(3)]
    for one in [*with_items, *others]:
        scheduler.add(one)
    run_step(scheduler)
    assert scheduler.running == with_items[:2]
    assert all(one.is_finished for one in others[:2]), "they had the two places left"
    run_step(scheduler)
    assert others[2].is_finished
    for item in items:
        item.embeddings = torch.zeros(2, 1)
    while scheduler.has_unfinished():
        assert run_step(scheduler)
    assert all(one.is_finished for one in with_items)


def test_nobody_waits_behind_one_whose_beginning_is_cached_and_whose_item_is_next() -> None:
    scheduler = make(budget=16)
    scheduler.add(sequence("before", 8, 1, prefix_root=b"same"))
    run_step(scheduler)
    scheduler.add(waits_for_item("one", 30, range(8, 12), prefix_root=b"same"))
    scheduler.add(sequence("other", 4, 1))
    assert sizes(run_step(scheduler)) == {"other": 4}


def test_a_preempted_sequence_goes_before_those_that_came_later() -> None:
    scheduler = make(num_blocks=4, max_num_seqs=2, budget=16)
    for name in ("old", "young", "youngest"):
        scheduler.add(sequence(name, 7, 8))
    while scheduler.num_preemptions == 0:
        run_step(scheduler)
    assert [one.request_id for one in scheduler.waiting] == ["young", "youngest"]


def test_a_span_is_never_split() -> None:
    scheduler = make(budget=16)
    span = BidirectionalSpan(10, 20, range(10, 20))
    scheduler.add(sequence("one", 30, 1, layout=PromptLayout(spans=(span,))))
    assert [sizes(run_step(scheduler))["one"] for _ in range(3)] == [10, 10, 10]


def with_span(name: str, num_prompt_tokens: int, positions: range, **settings: Any) -> Sequence:
    span = BidirectionalSpan.of(positions)
    return sequence(name, num_prompt_tokens, 3, layout=PromptLayout(spans=(span,)), **settings)


def test_a_span_longer_than_the_budget_takes_a_step() -> None:
    scheduler = make(budget=16)
    scheduler.add(with_span("one", 70, range(10, 50)))
    assert [sizes(run_step(scheduler))["one"] for _ in range(4)] == [10, 40, 10, 10]


def test_those_that_decode_go_on_beside_a_long_span_and_other_prompts_wait_for_it() -> None:
    scheduler = make(max_num_seqs=16, budget=16)
    for index in range(14):
        scheduler.add(sequence(f"stream {index}", 1, 9))
    streams = sizes(run_step(scheduler))
    scheduler.add(with_span("long", 40, range(40)))
    scheduler.add(sequence("behind", 8, 1))
    assert sizes(run_step(scheduler)) == {**streams, "long": 40}
    # Two of 16 tokens are left beside those that decode, one of them for the first prompt's next one.
    assert sizes(run_step(scheduler)) == {**streams, "long": 1, "behind": 1}


def test_a_long_span_waits_for_an_older_prompt_and_goes_before_younger_ones() -> None:
    scheduler = by_arrival(budget=16)
    scheduler.add(sequence("older", 40, 1))
    scheduler.add(with_span("long", 60, range(4, 44)))
    for index in range(3):
        scheduler.add(sequence(f"younger {index}", 30, 1))
    steps = [sizes(run_step(scheduler)) for _ in range(6)]
    assert steps[:2] == [{"older": 16}] * 2
    assert steps[2] == {"older": 8, "long": 4, "younger 0": 4}
    assert steps[3] == {"long": 40}
    assert steps[4] == {"long": 16}
    assert steps[5] == {"long": 1, "younger 0": 15}


def test_the_rest_of_a_long_span_whose_beginning_is_cached_takes_a_step() -> None:
    scheduler = make(budget=16)
    scheduler.add(with_span("first", 60, range(2, 42), prefix_root=b"same"))
    while scheduler.has_unfinished():
        run_step(scheduler)
    again = with_span("again", 60, range(2, 42), prefix_root=b"same")
    again.token_ids[22] = 7  # another picture from here on, as far as the cache knows
    scheduler.add(again)
    assert sizes(run_step(scheduler)) == {"again": 42 - 20}
    assert again.num_cached_tokens == 20


def test_a_long_span_that_is_preempted_is_computed_again_in_one_step() -> None:
    scheduler = make(num_blocks=16, budget=16)
    old, long = sequence("old", 4, 20), with_span("long", 40, range(40), num_prompt_logprobs=0)
    long.max_num_tokens = 60
    scheduler.add(old)
    scheduler.add(long)
    sizes_of_long = []
    while scheduler.has_unfinished():
        sizes_of_long.append(sizes(run_step(scheduler)).get("long", 0))
    assert scheduler.num_preemptions > 0
    assert sizes_of_long.count(40) == 2
    assert (old.num_output_tokens, long.num_output_tokens) == (20, 20)


def test_nobody_waits_behind_a_span_of_which_a_part_has_not_arrived() -> None:
    """As where all of a prompt sees itself, and one of its pictures is late."""
    scheduler = by_arrival(budget=16)
    items = [PromptItem("first", range(4), torch.zeros(4, 1)), PromptItem("late", range(4, 8), None)]
    late = with_span("late", 12, range(12), items=items)
    scheduler.add(late)
    others = [sequence(f"other {index}", 12, 1) for index in range(4)]
    for one in others:
        scheduler.add(one)
    assert sizes(run_step(scheduler)) == {"other 0": 12, "other 1": 4}
    items[1].embeddings = torch.zeros(4, 1)
    # It goes before those that came later, begun or not.
    assert sizes(run_step(scheduler)) == {"late": 12, "other 1": 4}
    assert sizes(run_step(scheduler)) == {"late": 1, "other 1": 4, "other 2": 11}


def test_nobody_waits_behind_a_span_that_is_late_where_blocks_are_few() -> None:
    scheduler = make(num_blocks=10, budget=16)
    scheduler.add(with_span("late", 36, range(36), items=[PromptItem("late", range(4, 8), None)]))
    scheduler.add(sequence("first", 4, 9))
    run_step(scheduler)
    scheduler.add(sequence("second", 4, 9))
    assert sizes(run_step(scheduler)) == {"first": 1, "second": 4}


def test_nobody_waits_behind_a_cached_beginning_and_a_span_of_which_a_part_has_not_arrived() -> None:
    scheduler = make(budget=16)
    scheduler.add(sequence("before", 8, 1, prefix_root=b"same"))
    run_step(scheduler)
    late = [PromptItem("late", range(12, 16), None)]
    scheduler.add(with_span("late", 30, range(8, 20), items=late, prefix_root=b"same"))
    scheduler.add(sequence("other", 4, 1))
    assert sizes(run_step(scheduler)) == {"other": 4}


def test_an_answer_that_goes_on_behind_its_cached_beginning_waits_for_a_long_span() -> None:
    """As one does that was preempted: its prompt counts as computed, and several tokens behind it do not."""
    scheduler = make(budget=16)
    scheduler.add(sequence("before", 20, 1, prefix_root=b"same"))
    while scheduler.has_unfinished():
        run_step(scheduler)
    scheduler.add(with_span("long", 40, range(40)))
    preempted = sequence("preempted", 20, 9, prefix_root=b"same")
    preempted.num_prompt_tokens = 4
    scheduler.add(preempted)
    assert sizes(run_step(scheduler)) == {"long": 40}
    assert sizes(run_step(scheduler)) == {"long": 1, "preempted": 4}


def of_tenant(tenant: str, count: int, num_output_tokens: int = 50) -> list[Sequence]:
    return [sequence(f"{tenant}{number}", 4, num_output_tokens, tenant=tenant) for number in range(count)]


def num_running(scheduler: Scheduler) -> Counter[str]:
    return Counter(one.tenant for one in scheduler.running)


def test_a_tenant_alone_has_all_places_and_another_one_starts_at_once() -> None:
    scheduler = make(num_blocks=1000, max_num_seqs=8, budget=64)
    for one in of_tenant("heavy", 100):
        scheduler.add(one)
    run_step(scheduler)
    assert num_running(scheduler) == {"heavy": 8}
    scheduler.add(sequence("light", 4, 3, tenant="light"))
    chunks = run_step(scheduler)
    assert sizes(chunks)["light"] == 4
    assert scheduler.num_decodes == 7
    assert [sizes(run_step(scheduler))["light"] for _ in range(2)] == [1, 1]
    run_step(scheduler)
    assert num_running(scheduler) == {"heavy": 8}
    assert scheduler.num_preemptions == 1


def test_two_tenants_with_much_to_do_have_as_many_places() -> None:
    scheduler = make(num_blocks=1000, max_num_seqs=8, budget=64)
    for tenant in ("first", "second"):
        for one in of_tenant(tenant, 30):
            scheduler.add(one)
        run_step(scheduler)
        run_step(scheduler)
    assert num_running(scheduler) == {"first": 4, "second": 4}
    num_preemptions = scheduler.num_preemptions
    for _ in range(30):
        run_step(scheduler)
    assert scheduler.num_preemptions == num_preemptions


def test_a_tenant_s_blocks_make_room_for_another_s_prompt_only_if_they_are_enough() -> None:
    scheduler = make(num_blocks=12, max_num_seqs=8, budget=64)
    for one in of_tenant("heavy", 6, num_output_tokens=3):
        scheduler.add(one)
    run_step(scheduler)
    scheduler.add(sequence("large", 47, 1, tenant="light"))
    run_step(scheduler)
    assert (num_running(scheduler), scheduler.num_preemptions) == ({"heavy": 6}, 0)
    scheduler.add(sequence("small", 20, 1, tenant="third"))
    assert "small" in sizes(run_step(scheduler))
    assert scheduler.num_preemptions > 0
    while scheduler.has_unfinished():
        run_step(scheduler)


def test_a_low_priority_goes_first_whatever_its_tenant_runs() -> None:
    scheduler = make(num_blocks=1000, max_num_seqs=2, budget=64)
    for one in of_tenant("urgent", 4):
        one.priority = -1
        scheduler.add(one)
    run_step(scheduler)
    scheduler.add(sequence("other", 4, 1, tenant="other"))
    assert "other" not in sizes(run_step(scheduler))


def test_an_older_prompt_takes_blocks_from_younger_streams() -> None:
    """And never the other way round: else a stream of short requests would keep a long prompt out for ever."""
    scheduler = make(num_blocks=16, budget=40)
    old = waits_for_item("old", 60, range(32, 33))
    scheduler.add(old)
    run_step(scheduler)
    for name in ("young", "youngest"):
        scheduler.add(sequence(name, 12, 8))
    run_step(scheduler)
    assert [one.request_id for one in scheduler.running] == ["old", "young", "youngest"]
    old.items[0].embeddings = torch.empty(1, 1)
    while not old.is_prompt_computed:
        assert "old" in sizes(run_step(scheduler))
    assert scheduler.num_preemptions > 0


def test_a_repeated_beginning_is_not_computed_again() -> None:
    scheduler = make(budget=16)
    for name in ("first", "second"):
        scheduler.add(sequence(name, 14, 1, prefix_root=b"same"))
        assert sizes(run_step(scheduler)) == {name: 14 if name == "first" else 2}


def test_answers_to_one_prompt_compute_it_once() -> None:
    scheduler = make(budget=16)
    first = sequence("one", 22, 3)
    others = [sequence(name, 22, 3, prefix_root=b"one", parent=first) for name in ("two", "three")]
    for one in (first, *others):
        scheduler.add(one)
    steps = [sizes(run_step(scheduler)) for _ in range(3)]
    assert steps == [{"one": 11}, {"one": 11}, {"one": 1, "two": 2, "three": 2}]


def test_an_aborted_sequence_gives_its_blocks_back() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    scheduler = Scheduler(manager, 4, 16)
    running, waiting = sequence("running", 8, 5), sequence("waiting", 60, 5)
    for one in (running, waiting):
        scheduler.add(one)
    run_step(scheduler)
    for one in (running, waiting):
        scheduler.finish(one, FinishReason.ABORT)
    assert manager.num_free_blocks == 10
    assert not scheduler.has_unfinished()
