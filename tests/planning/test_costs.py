"""The files of costs and loads, and what is wrong with them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.planning.calibration import Alone, calibrated
from raylens.planning.costs import Costs, read_costs
from raylens.planning.load import Arrival, LoadProfile, Picture, arrivals
from raylens.planning.settings import PlanError, read_mapping
from raylens.planning.simulation import Fleet, simulate
from tests.planning.example_costs import example_costs, example_values


def write(folder: Path, values: Any) -> Path:
    path = folder / "costs.json"
    path.write_text(json.dumps(values))
    return path


def test_costs_survive_their_file(tmp_path: Path) -> None:
    assert read_costs(write(tmp_path, example_costs().model_dump())) == example_costs()


def test_a_benchmarks_document_has_them_inside(tmp_path: Path) -> None:
    assert read_costs(write(tmp_path, {"costs": example_values(), "checks": {}})) == example_costs()


def test_a_figure_is_replaced_by_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, example_values())
    costs = read_costs(path, {"generate.seconds_per_step": 0.5, "generate.reserved.gpus": 2})
    assert (costs.generate.seconds_per_step, costs.generate.reserved.gpus) == (0.5, 2)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"version": 2}, "version: Input should be 1, not 2"),
        (
            {"encode": {"seconds_per_patch": -1}},
            "encode.seconds_per_patch: Input should be greater than or equal to 0",
        ),
        ({"generate": {"max_num_seqs": 0}}, "generate.max_num_seqs: Input should be greater than or equal to 1, not 0"),
        ({"proxy": {"wrok": {}}}, "proxy.wrok: Extra inputs are not permitted"),
        ({"model": {"patches_per_picture": "many"}}, "model.patches_per_picture: Input should be a valid number"),
    ],
)
def test_a_wrong_figure_is_named_with_its_limit_and_value(tmp_path: Path, groups: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        read_costs(write(tmp_path, example_values(**groups)))


def test_a_figure_that_there_is_not_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, example_values())
    with pytest.raises(PlanError, match="generate.seconds_per_stop: Extra inputs are not permitted"):
        read_costs(path, {"generate.seconds_per_stop": 1.0})
    with pytest.raises(PlanError, match="version is a figure, not a group of figures"):
        read_costs(path, {"version.minor": 1.0})


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_a_file_without_fields_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=re.escape(str(path))):
        read_costs(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        read_mapping(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"requests_per_second": 0}, "load: requests_per_second: Input should be greater than 0, not 0"),
        (
            {"requests_per_second": 1, "picture_share": 1.5},
            "picture_share: Input should be less than or equal to 1, not 1.5",
        ),
        (
            {"requests_per_second": 1, "answer_tokens": 0},
            "answer_tokens: Input should be greater than or equal to 1, not 0",
        ),
        ({"requests_per_second": 1, "picture_share": 0.5, "megapixels": []}, "megapixels must name a picture"),
        ({"requests_per_second": 1, "megapixels": [-1]}, "megapixels.0: Input should be greater than 0, not -1"),
        ({"rate": 1}, "rate: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_load_is_named_with_its_limit_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        LoadProfile.checked(fields, "load")


@given(st.floats(0.1, 1000), st.floats(0, 1), st.integers(0, 100), st.sampled_from(["fixed", "geometric"]))
@settings(max_examples=30, deadline=None)
def test_arrivals_are_those_of_the_profile(rate: float, share: float, seed: int, lengths: Any) -> None:
    load = LoadProfile(requests_per_second=rate, picture_share=share, answer_tokens=50, lengths=lengths)
    came = arrivals(load, 600, seed)
    assert came == arrivals(load, 600, seed)
    assert came[-1].moment == pytest.approx(600 / rate, rel=0.25)
    assert sum(bool(one.pictures) for one in came) / 600 == pytest.approx(share, abs=0.12)
    assert sum(one.answer_tokens for one in came) / 600 == pytest.approx(50, rel=0.25)
    assert all(one.answer_tokens >= 1 for one in came)


def test_another_rate_brings_the_same_requests_at_other_moments() -> None:
    slow, fast = (arrivals(LoadProfile(requests_per_second=rate, picture_share=0.5), 50, 3) for rate in (1, 10))
    assert [one.pictures for one in slow] == [one.pictures for one in fast]
    assert [one.moment for one in slow] == pytest.approx([10 * one.moment for one in fast])


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.6])
def test_a_calibrated_request_alone_takes_as_long_as_measured(factor: float) -> None:
    """Where all work takes longer than measured, a part of it is behind the request. Where it takes less, the rest is
    time in which nothing is computed."""
    costs = example_costs(shared={"work": {"seconds_per_new_picture": 0.01, "seconds_per_repeated_picture": 0.002}})
    targets = {"text": 0.012, "new": 0.05, "repeated": 0.016}
    alone = Alone(
        text_tokens=100,
        megapixels=1.0,
        ttft_text=targets["text"] * max(1.0, factor),
        ttft_new_picture=targets["new"] * factor,
        ttft_repeated_picture=targets["repeated"] * max(1.0, factor),
        answer_tokens=11,
        tpot=0.003,
    )
    found: Costs = calibrated(costs, alone, cores=2)
    fleet = Fleet(cores=2, has_client=True)
    picture = Arrival(0.0, (Picture(1.0, False, 0),), 100, 1)
    stream = Arrival(0.0, (), 100, 11)
    assert simulate(found, fleet, [picture]).ttft_p50 == pytest.approx(targets["new"] * factor, rel=0.01)
    assert simulate(found, fleet, [stream]).tpot_p50 == pytest.approx(0.003, rel=0.02)
