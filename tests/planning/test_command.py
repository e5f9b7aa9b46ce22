"""`raylens plan` as people type it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raylens.deployments.launch import cli
from tests.planning.example_costs import example_costs

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(json.dumps(example_costs().model_dump()))
    return str(path)


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raylens", "plan", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)


def test_help_teaches() -> None:
    text = plan("--help").stdout
    for part in (
        "raylens plan --costs",
        "--picture-share",
        "benchmarks.stage_costs",
        "--gpus 1000",
        "docs/planning.md",
    ):
        assert part in text


def test_it_shows_replicas_and_what_to_expect(costs: str) -> None:
    result = plan(
        "--costs", costs, "--rate", "20", "--picture-share", "0.5", "--answer-tokens", "20", "--ttft-p95-ms", "500"
    )
    assert result.returncode == 0, result.stderr
    for part in ("Ingress", "Shared", "Preprocess", "Encode", "Generate", "TTFT", "TPOT", "500.0 ms", "limits"):
        assert part in result.stdout
    assert "ceiling" not in result.stdout


def test_json_has_the_same_and_every_run_the_same_json(costs: str) -> None:
    arguments = ["--costs", costs, "--rate", "20", "--answer-tokens", "5", "--json"]
    first, second = (plan(*arguments).stdout for _ in range(2))
    assert first == second
    document = json.loads(first)
    assert [stage["name"] for stage in document["stages"]] == ["ingress", "shared", "preprocess", "encode", "generate"]
    assert document["predicted"]["ttft_p50_seconds"] > 0
    assert document["limiting_stage"] in ("ingress", "generate")


def test_a_load_comes_from_a_file_and_options_go_before_it(costs: str, tmp_path: Path) -> None:
    path = tmp_path / "load.yaml"
    path.write_text("requests_per_second: 5\npicture_share: 0.5\nmegapixels: [0.5, 2.0]\nanswer_tokens: 10\n")
    document = json.loads(plan("--costs", costs, "--load", str(path), "--rate", "7", "--json").stdout)
    assert document["load"]["requests_per_second"] == 7
    assert document["load"]["megapixels"] == [0.5, 2.0]


def test_a_large_fleet_says_what_is_next_and_what_is_assumed(costs: str) -> None:
    result = plan(
        *("--costs", costs, "--rate", "50", "--gpus", "1000", "--answer-tokens", "50"),
        *("--cost", "generate.reserved.gpus=1", "--cost", "generate.seconds_per_step=0.02"),
    )
    assert result.returncode == 0, result.stderr
    for part in (
        "The next ceiling: ",
        "Serve controller: assumed: --controller-ms",
        "Assumed, not measured: generate.seconds_per_step = 0.02 (--cost)",
        "--network-gbit",
        "Simulated: ",
    ):
        assert part in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "-3"], "load: requests_per_second: Input should be greater than 0, not -3.0"),
        ([], "load: requests_per_second: must be given, by --rate or in the file of --load"),
        (["--rate", "3", "--ttft-p95-ms", "0"], "SLO: ttft_p95_seconds: Input should be greater than 0, not 0.0"),
        (["--rate", "3", "--cost", "x"], "--cost x: must be NAME=VALUE with a number as the value"),
        (["--rate", "3", "--cost", "encode.x=1"], "encode.x: Extra inputs are not permitted, not 1.0"),
        (["--rate", "3", "--gpus", "2"], "gpus: must be 0 with costs whose stages use none, not 2"),
        (["--rate", "3", "--gpus", "2", "--cores", "2"], "cores: must not be given with --gpus"),
        (["--rate", "3", "--cores", "0"], "cores: must be at least 1, not 0"),
        (["--rate", "900", "--cores", "2", "--answer-tokens", "4"], "are the fewest that would not"),
        (["--rate", "3", "--network-gbit", "0"], "options: network_gbit: Input should be greater than 0, not 0.0"),
        (["--rate", "3", "--load", "/no/such.yaml"], "/no/such.yaml: "),
    ],
)
def test_wrong_arguments_are_one_line(
    costs: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_stop_on_signals", lambda: None)  # the signals are pytest's
    assert cli.main(["plan", "--costs", costs, *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.startswith("raylens: ")
    assert told.err.count("\n") == 1
