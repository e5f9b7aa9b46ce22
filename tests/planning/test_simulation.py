"""What the simulated stages do: batches, chunks, limits, and that more replicas do no harm."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.planning.costs import GenerateCosts
from raylens.planning.language_engine import prompt_room, share_out
from raylens.planning.load import Arrival, LoadProfile, Picture, arrivals
from raylens.planning.outcome import STAGES, Window, percentile
from raylens.planning.request_run import RequestRun
from raylens.planning.settings import PlanError
from raylens.planning.simulation import Fleet, run, simulate
from tests.planning.example_costs import example_costs, idle_costs

LOAD = LoadProfile(requests_per_second=40, picture_share=0.5, megapixels=(1.0, 0.5), repeated_share=0.3)


def prompt(tokens: int) -> RequestRun:
    arrival = Arrival(0.0, (), tokens, 1)
    return RequestRun(arrival, ingress=0, prompt_tokens=tokens, on_path_share=1.0, wait_seconds=0.0)


def pictures(count: int) -> tuple[Picture, ...]:
    return tuple(Picture(1.0, False, key) for key in range(count))


@pytest.mark.parametrize("cores", [None, 2])
def test_the_same_seed_gives_the_same_outcome(cores: int | None) -> None:
    fleet = Fleet(generate=2, preprocess=2, cores=cores)
    first, second = (simulate(example_costs(), fleet, arrivals(LOAD, 200, 7), seed=3) for _ in range(2))
    assert first == second
    assert simulate(example_costs(), fleet, arrivals(LOAD, 200, 8), seed=3) != first


@given(st.sampled_from(STAGES), st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_more_replicas_are_never_worse(stage: str, seed: int) -> None:
    """But for noise: another replica changes who meets whom."""
    few = dict.fromkeys(STAGES, 1)
    came = arrivals(LOAD, 300, seed)
    one = simulate(example_costs(), Fleet.of(few), came)
    more = simulate(example_costs(), Fleet.of({**few, stage: 3}), came)
    assert more.ttft_p95 <= one.ttft_p95 * 1.1 + 0.002
    assert more.tpot_p50 is not None
    assert one.tpot_p50 is not None
    assert more.tpot_p50 <= one.tpot_p50 * 1.1 + 0.0005


def test_sequences_that_decode_together_share_steps() -> None:
    costs = idle_costs(generate={"seconds_per_step": 0.01, "seconds_per_sequence": 0.001})
    together = [Arrival(0.0, (), 1, 101)] * 8
    outcome = simulate(costs, Fleet(), together)
    assert outcome.tpot_p50 == pytest.approx(0.01 + 8 * 0.001, rel=0.03)
    assert outcome.mean_batch == pytest.approx(8, rel=0.05)


def test_no_more_sequences_run_than_may() -> None:
    costs = idle_costs(generate={"seconds_per_step": 0.01, "max_num_seqs": 2})
    _, requests = run(costs, Fleet(), [Arrival(0.0, (), 1, 10)] * 4)
    ends = sorted(round(request.last_token, 6) for request in requests)
    assert ends == [0.1, 0.11, 0.2, 0.21]  # the first request has a step to itself, when it comes


def test_a_long_prompt_holds_no_stream_up_longer_than_is_promised() -> None:
    costs = GenerateCosts.model_validate(
        example_costs().generate.model_dump() | {"max_decode_slowdown": 5.0, "max_num_batched_tokens": 4096}
    )
    room = prompt_room(costs, 4)
    assert costs.of_step(4, room) <= 5.0 * costs.of_step(4, 0)
    assert costs.of_step(4, room + 8) > 5.0 * costs.of_step(4, 0)
    assert prompt_room(costs, 0) == 4096


def test_half_of_a_steps_tokens_go_to_the_prompts_that_lack_the_fewest() -> None:
    long, short = prompt(1000), prompt(60)
    assert share_out([long, short], 100, 0.5) == {long: 50, short: 50}
    assert share_out([long, short], 100, 0.0) == {long: 100}
    assert share_out([long], 100, 0.5) == {long: 100}


@given(st.lists(st.integers(1, 400), min_size=1, max_size=10), st.integers(1, 512), st.floats(0, 0.9))
@settings(max_examples=80, deadline=None)
def test_a_step_takes_all_tokens_that_fit_and_no_more(lengths: list[int], room: int, share: float) -> None:
    prompts = [prompt(length) for length in lengths]
    chunks = share_out(prompts, room, share)
    assert sum(chunks.values()) == min(room, sum(lengths))
    assert all(0 < taken <= request.num_lacking for request, taken in chunks.items())


def test_pictures_that_wait_are_encoded_together() -> None:
    costs = idle_costs(encode={"seconds_per_batch": 1.0, "max_batch_patches": 300})
    assert simulate(costs, Fleet(), [Arrival(0.0, pictures(7), 1, 1)]).ttft_p50 == pytest.approx(3.0)


def test_a_picture_over_half_of_a_batch_joins_none() -> None:
    costs = idle_costs(
        encode={"seconds_per_batch": 1.0, "max_batch_patches": 100},
        model={"patches_per_picture": 0, "patches_per_megapixel": 100},
    )
    for last, batches in ((0.5, 2), (0.6, 3)):  # the first is encoded while the others wait
        sizes = (0.1, 0.4, last)
        three = tuple(Picture(size, False, key) for key, size in enumerate(sizes))
        assert simulate(costs, Fleet(), [Arrival(0.0, three, 1, 1)]).ttft_p50 == pytest.approx(batches)


def test_a_repeated_picture_is_neither_processed_nor_encoded() -> None:
    costs = idle_costs(
        preprocess={"seconds_per_item": 1.0},
        encode={"seconds_per_batch": 1.0},
        shared={"work": {"seconds_per_repeated_picture": 0.1}},
    )
    known = Arrival(0.0, (Picture(1.0, True, 0),), 1, 1)
    assert simulate(costs, Fleet(), [known]).ttft_p50 == pytest.approx(0.1)


def test_pictures_of_one_request_go_to_several_replicas() -> None:
    costs = idle_costs(preprocess={"seconds_per_item": 1.0})
    one, many = ([Arrival(0.0, pictures(8), 1, 1)] for _ in range(2))
    assert simulate(costs, Fleet(), one).ttft_p50 == pytest.approx(8.0)
    assert simulate(costs, Fleet(preprocess=8), many).ttft_p50 <= 4.0


def test_a_popular_picture_spills_to_another_replica() -> None:
    costs = idle_costs(preprocess={"seconds_per_item": 1.0})
    alike = tuple(Picture(1.0, False, 5) for _ in range(12))
    assert simulate(costs, Fleet(preprocess=2), [Arrival(0.0, alike, 1, 1)]).ttft_p50 <= 8.0


def test_a_client_on_the_machine_takes_its_time_of_it() -> None:
    costs = example_costs()
    came = arrivals(LOAD, 100, 0)
    busy = costs.model_copy(update={"client": costs.ingress.work})
    beside = simulate(busy, Fleet(cores=2, has_client=True), came)
    elsewhere = simulate(busy, Fleet(cores=2, has_client=False), came)
    assert beside.cores_busy > elsewhere.cores_busy
    assert beside.ttft_p50 > elsewhere.ttft_p50


def test_work_behind_a_request_delays_the_next_but_not_itself() -> None:
    half = example_costs(on_path_share={"text": 0.5, "new_picture": 0.5, "repeated_picture": 0.5}).on_path_share
    work = example_costs(ingress={"work": {"seconds_per_request": 0.2}}).ingress.work
    costs = idle_costs().model_copy(update={"on_path_share": half, "client": work})
    load = [Arrival(0.0, (), 1, 1), Arrival(0.15, (), 1, 1)]
    first, second = run(costs, Fleet(cores=4, has_client=True), load)[1]
    # Each is sent after 0.1 s. The client reads an answer behind what it has to do for the request.
    assert (first.time_to_first_token, second.time_to_first_token) == pytest.approx((0.2, 0.05 + 0.2))


def test_a_window_leaves_out_the_first_and_the_last() -> None:
    assert Window(0.2, 0.9).of(10) == (2, 9)
    assert Window(0.2, 0.9).of(1) == (0, 1)
    outcome = simulate(example_costs(), Fleet(), arrivals(LOAD, 300, 0), window=Window(0.2, 0.9))
    assert outcome.ttft_p50 <= outcome.ttft_p95


def test_percentiles_are_interpolated() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 95) == 9.5
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_no_request_and_no_replica_are_refused() -> None:
    with pytest.raises(PlanError, match="load: must have at least 1 request, not 0"):
        simulate(example_costs(), Fleet(), [])
    with pytest.raises(PlanError, match="replicas of encode: must be at least 1, not 0"):
        Fleet(encode=0)
    with pytest.raises(PlanError, match="cores: must be at least 1, not 0"):
        Fleet(cores=0)


def test_a_step_waits_for_the_interpreter_of_its_replica() -> None:
    """Work for another request keeps the engine from a step, as far as that needs the interpreter."""
    times = []
    for locked in (0.0, 0.01):
        costs = idle_costs(
            generate={
                "work": {"seconds_per_request": 0.05},
                "seconds_per_step": 0.01,
                "interpreter_seconds_per_step": locked,
            }
        )
        first, _ = run(costs, Fleet(), [Arrival(0.0, (), 1, 11), Arrival(0.08, (), 1, 1)])[1]
        times.append(first.last_token)
    assert times[0] == pytest.approx(0.05 + 0.11)
    assert times[1] > times[0] + 0.03
