"""What the simulated stages do: batches, chunks, limits, and that more replicas do no harm."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.planning.load import Arrival, LoadProfile, Picture, arrivals
from raylens.planning.simulation import STAGES, Fleet, percentile, simulate
from tests.planning.example_costs import example_costs, idle_costs

LOAD = LoadProfile(requests_per_second=40, picture_share=0.5, megapixels=(1.0, 0.5), repeated_share=0.3)


def pictures(count: int) -> tuple[Picture, ...]:
    return tuple(Picture(1.0, False, key) for key in range(count))


@pytest.mark.parametrize("cores", [None, 2])
def test_the_same_seed_gives_the_same_outcome(cores: int | None) -> None:
    fleet = Fleet({"generate": 2, "preprocess": 2}, cores)
    first, second = (simulate(example_costs(), fleet, arrivals(LOAD, 200, 7), seed=3) for _ in range(2))
    assert first == second
    assert simulate(example_costs(), fleet, arrivals(LOAD, 200, 8), seed=3) != first


@given(st.sampled_from(STAGES), st.integers(0, 20))
@settings(max_examples=10, deadline=None)
def test_more_replicas_are_never_worse(stage: str, seed: int) -> None:
    """But for noise: another replica changes who meets whom."""
    came = arrivals(LOAD, 300, seed)
    one = simulate(example_costs(), Fleet(), came)
    more = simulate(example_costs(), Fleet({stage: 3}), came)
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
    answers = simulate(costs, Fleet(), [Arrival(0.0, (), 1, 10)] * 4).answers
    ends = sorted(round(answer.last_token, 6) for answer in answers)
    # The second prompt waits while the first one has a step, and one to show how long decoding takes.
    assert ends == [0.1, 0.12, 0.2, 0.22]


@pytest.mark.parametrize("slowdown", [None, 5.0])
def test_a_long_prompt_holds_streams_up_as_the_engines_own_step_budget_says(slowdown: float | None) -> None:
    """A step of the whole prompt takes 0.4 s, and one that only decodes 0.01 s."""
    generate = {"seconds_per_step": 0.01, "seconds_per_prompt_token": 0.0001, "max_num_batched_tokens": 4096}
    costs = idle_costs(generate=generate | {"max_decode_slowdown": slowdown})
    stream, _ = simulate(costs, Fleet(), [Arrival(0.0, (), 1, 11), Arrival(0.055, (), 4000, 1)]).answers
    seconds = stream.last_token - stream.first_token
    if slowdown is None:
        assert seconds > 0.4
    else:
        assert 0.1 < seconds < 10 * slowdown * 0.01


def test_a_short_prompt_shares_steps_with_a_long_one_as_the_engines_own_scheduler_says() -> None:
    costs = idle_costs(generate={"seconds_per_prompt_token": 0.001, "max_num_batched_tokens": 100})
    prompts = [Arrival(0.0, (), tokens, 1) for tokens in (1000, 50)]
    long, short = simulate(costs, Fleet(), prompts).answers
    assert (short.first_token, long.first_token) == pytest.approx((0.2, 1.05))  # half of the second step's tokens


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
    assert simulate(costs, Fleet({"preprocess": 8}), many).ttft_p50 <= 4.0


def test_pictures_wait_while_every_replica_has_as_many_as_it_may() -> None:
    """With a limit of one, the replica's loop gets the second picture when the first one is done."""
    preprocess = {"seconds_per_item": 1.0, "work": {"seconds_per_new_picture": 0.001}}
    for limit, seconds in ((1, 2.002), (2, 2.001)):
        costs = idle_costs(preprocess=preprocess | {"max_ongoing_items": limit})
        assert simulate(costs, Fleet(), [Arrival(0.0, pictures(2), 1, 1)]).ttft_p50 == pytest.approx(seconds, rel=1e-6)


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
    first, second = simulate(costs, Fleet(cores=4, has_client=True), load).answers
    # Each is sent after 0.1 s. The client reads an answer behind what it has to do for the request.
    assert (first.time_to_first_token, second.time_to_first_token) == pytest.approx((0.2, 0.05 + 0.2))


def test_a_window_leaves_out_the_first_and_the_last() -> None:
    costs = idle_costs(generate={"seconds_per_prompt_token": 0.001})
    load = [Arrival(float(number), (), tokens, 1) for number, tokens in enumerate((400, 100, 100, 400))]
    assert simulate(costs, Fleet(), load, window=(0.25, 0.75)).ttft_p95 == pytest.approx(0.1)


def test_percentiles_are_interpolated() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 95) == 9.5


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
        first, _ = simulate(costs, Fleet(), [Arrival(0.0, (), 1, 11), Arrival(0.08, (), 1, 1)]).answers
        times.append(first.last_token)
    assert times[0] == pytest.approx(0.05 + 0.11)
    assert times[1] > times[0] + 0.03
