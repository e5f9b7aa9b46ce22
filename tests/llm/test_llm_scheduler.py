"""The scheduler without a model: budgets, fairness, preemption, and that everything ends."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llm.block_manager import BlockManager
from llm.sampling_params import SamplingParams
from llm.scheduler import ScheduledChunk, Scheduler
from llm.sequence import FinishReason, Sequence

BLOCK_SIZE = 4


def sequence(name: str, num_prompt_tokens: int, num_output_tokens: int) -> Sequence:
    return Sequence(
        name, [0] * num_prompt_tokens, num_prompt_tokens, [], SamplingParams(), num_prompt_tokens + num_output_tokens
    )


def make(num_blocks: int = 100, max_num_seqs: int = 8, budget: int = 16) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, BLOCK_SIZE), max_num_seqs, budget)


def run_step(scheduler: Scheduler) -> list[ScheduledChunk]:
    """What the engine does around the model: advance, append a token where one is sampled, end."""
    chunks = scheduler.schedule()
    sampling = [chunk.sequence for chunk in chunks if chunk.samples]
    for chunk in chunks:
        chunk.sequence.num_computed_tokens += chunk.num_tokens
    for sampled in sampling:
        sampled.append_token(1)
        if sampled.num_tokens >= sampled.max_num_tokens:
            sampled.finish(FinishReason.LENGTH)
    scheduler.remove_finished()
    return chunks


def sizes(chunks: list[ScheduledChunk]) -> dict[str, int]:
    return {chunk.sequence.request_id: chunk.num_tokens for chunk in chunks}


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    scheduler = make(budget=16)
    scheduler.add(sequence("a", 40, 1))
    assert [sizes(run_step(scheduler)) for _ in range(3)] == [{"a": 16}, {"a": 16}, {"a": 8}]
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


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(0, 5)), min_size=1, max_size=12),
    num_blocks=st.integers(10, 30),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
)
def test_everything_ends_within_budget(
    requests: list[tuple[int, int, int]], num_blocks: int, max_num_seqs: int, budget: int
) -> None:
    """Requests of (prompt tokens, output tokens, step of arrival)."""
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(manager, max_num_seqs, budget)
    sequences = [sequence(str(i), prompt, output) for i, (prompt, output, _) in enumerate(requests)]
    for step in range(2000):
        for one, (_, _, arrival) in zip(sequences, requests, strict=True):
            if arrival == step:
                scheduler.add(one)
        if step > 5 and not scheduler.has_unfinished():
            break
        chunks = run_step(scheduler)
        assert chunks or not scheduler.has_unfinished()
        assert sum(chunk.num_tokens for chunk in chunks) <= budget
        assert len(scheduler.running) <= max_num_seqs
        assert len({chunk.sequence.request_id for chunk in chunks}) == len(chunks)
        manager.check_integrity(sequences)
    assert all(one.is_finished for one in sequences)
    assert manager.num_free_blocks == num_blocks


def test_an_aborted_sequence_gives_its_blocks_back() -> None:
    manager = BlockManager(10, BLOCK_SIZE)
    scheduler = Scheduler(manager, 4, 16)
    running, waiting = sequence("running", 8, 5), sequence("waiting", 60, 5)
    for one in (running, waiting):
        scheduler.add(one)
    run_step(scheduler)
    for one in (running, waiting):
        one.finish(FinishReason.ABORT)
    scheduler.remove_finished()
    assert manager.num_free_blocks == 10
    assert not scheduler.has_unfinished()
