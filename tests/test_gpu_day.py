"""The benchmark of a day on a GPU: no part takes another one along."""

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import parts as parts_module
from benchmarks.gpu_day import PARITY_FAMILIES, PARTS, chosen_parts, file_name, run_all, table
from benchmarks.gpu_tests import AllResults, Results, files_with_gpu_tests
from benchmarks.llm_cuda import Bench, measured_document, unmerged
from benchmarks.parts import Document, Outcome, Part, run_part
from benchmarks.step_profile import busy_time
from raylens.modeling.merged_linear import merge_linear_layers
from tests.waiting import wait_until

WRITE = """
import json, os, signal, sys, time
output = sys.argv[sys.argv.index("--output") + 1]
def save(**measured): open(output, "w").write(json.dumps({"measured": measured}))
"""


def part(name: str, code: str, seconds: float = 30, **more: Any) -> Part:
    return Part(name, ("-c", WRITE + code), seconds, **more)


GOOD = part("good", "save(speed={'share_of_limit': 0.5})")
CRASHING = part("crashing", "save(first={'ms': 1}); print('half way'); sys.stdout.flush(); os.abort()")
RAISING = part("raising", "raise ValueError('no such kernel')")
HANGING = part("hanging", "save(first={'ms': 2}); print('so far', flush=True); time.sleep(600)", 5)
STUBBORN = part("stubborn", "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)", 1)
LACKING = part("lacking", "save(never={})", needs=("no_such_module",))


def run(parts: list[Part], seconds: float = 60, output: Path | None = None) -> tuple[dict[str, Outcome], Document]:
    document: Document = {"parts": {}}
    return run_all(parts, seconds, document, output), document


@pytest.fixture(autouse=True)
def _short_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives parts that are ended half a second. They ignore SIGINT where the tests run behind a shell's `&`."""
    monkeypatch.setattr(parts_module, "END_SECONDS", 0.5)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Outcome], Document, Path]:
    """Outcomes, document and file of parts of all kinds."""
    file = tmp_path_factory.mktemp("day") / "day.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_module, "END_SECONDS", 0.5)
        outcomes, document = run([CRASHING, RAISING, HANGING, STUBBORN, LACKING, GOOD], output=file)
    return outcomes, document, file


@pytest.mark.slow
def test_a_part_that_crashes_or_hangs_takes_no_other_along(day: tuple[dict[str, Outcome], Document, Path]) -> None:
    outcomes, document, file = day
    states = {name: (outcome.state, outcome.reason) for name, outcome in outcomes.items()}
    assert states == {
        "crashing": ("failed", "signal SIGABRT"),
        "raising": ("failed", "exit status 1"),
        "hanging": ("timed out", "took more than 5 s"),
        "stubborn": ("timed out", "took more than 1 s"),
        "lacking": ("skipped", "no_such_module cannot be imported"),
        "good": ("ok", ""),
    }
    assert json.loads(file.read_text()) == document
    assert document["parts"]["good"]["document"] == {"measured": {"speed": {"share_of_limit": 0.5}}}


@pytest.mark.slow
def test_the_table_has_errors_and_what_was_measured_before_them(
    day: tuple[dict[str, Outcome], Document, Path],
) -> None:
    lines = [" ".join(line.split()) for line in table(day[0])]
    assert "first ms 1" in lines
    assert "| half way" in lines
    assert "| ValueError: no such kernel" in lines
    assert "first ms 2" in lines
    assert "| so far" in lines
    assert "speed share_of_limit 0.5" in lines


def test_what_a_part_leaves_running_is_ended(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    code = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(left)!r}, 'w').write(str(p.pid))"
    assert run_part(part("leaving", code)).state == "ok"
    status = Path("/proc", left.read_text(), "status")
    wait_until(lambda: not status.exists() or "(zombie)" in status.read_text())


def test_no_part_runs_beyond_the_time_of_all() -> None:
    outcomes, _ = run([part("slow", "time.sleep(600)", 300), GOOD], seconds=1)
    assert [outcome.state for outcome in outcomes.values()] == ["timed out", "skipped"]


def test_the_document_has_what_a_running_part_has_measured(tmp_path: Path) -> None:
    """A day that is killed keeps it."""
    file, go_on = tmp_path / "day.json", tmp_path / "go on"
    code = f"save(first=1)\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.05)\nsave(first=1, second=2)"
    with ThreadPoolExecutor() as pool:
        day = pool.submit(run, [part("slow", code)], output=file)
        wait_until(file.exists)
        running = json.loads(file.read_text())["parts"]["slow"]
        go_on.touch()
        _, document = day.result()
    assert (running["state"], running["document"]) == ("running", {"measured": {"first": 1}})
    assert document["parts"]["slow"]["state"] == "ok"
    assert document["parts"]["slow"]["document"] == {"measured": {"first": 1, "second": 2}}


def test_a_part_without_time_keeps_an_earlier_result() -> None:
    document: Document = {"parts": {"good": {"state": "ok"}}}
    run_all([part("slow", "time.sleep(600)", 300), GOOD], 1, document, None)
    assert document["parts"]["good"] == {"state": "ok"}


def test_parts_keep_their_order_and_get_the_device() -> None:
    chosen = chosen_parts(["profile", "decode"], PARTS[0].name, "cpu", tiny=True)
    assert [one.name for one in chosen] == ["decode", "profile"]
    assert all(one.arguments[-3:] == ("--device", "cpu", "--tiny") for one in chosen)
    everything = chosen_parts(None, PARTS[0].name, "cuda", tiny=False)
    assert all(importlib.util.find_spec(one.arguments[1]) for one in everything)
    assert [one.name for one in chosen_parts(None, "profile", "cuda", tiny=False)] == [
        one.name for one in everything[[one.name for one in everything].index("profile") :]
    ]


@pytest.mark.long
def test_a_day_without_its_longest_parts_on_the_cpu(tmp_path: Path) -> None:
    """Other parts' results stay in the file."""
    names = ["smoke-language", "smoke-vision", "decode", "prefill", "tower", "profile"]
    measured = measured_on_the_cpu(names, tmp_path / "day.json")
    assert measured["smoke-language"]["decode"]["equal_tokens"] == "8 of 8"
    assert measured["smoke-vision"]["tower"]["distance_to_transformers"] < 1e-3
    assert measured["decode"]["decode_4"]["share_of_limit"] > 0


@pytest.mark.slow
def test_the_longest_parts_on_the_cpu(tmp_path: Path) -> None:
    measured = measured_on_the_cpu(["parity", "pipeline-llava"], tmp_path / "day.json")
    assert measured["parity"]["tests"] == {"passed": 2 * len(PARITY_FAMILIES), "failures": []}
    assert measured["pipeline-llava"]["separate_capacity"]["pictures_per_second"] > 0


def measured_on_the_cpu(names: list[str], file: Path) -> dict[str, Any]:
    """What the parts of these names have measured."""
    file.write_text(json.dumps({"device": "cpu", "parts": {"an older part": {"state": "ok"}}}))
    command = ["-m", "benchmarks.gpu_day", "--device", "cpu", "--tiny", "--minutes", "2", "--output", str(file)]
    command += ["--parts", *names]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=parts_module.TREE, check=False
    )
    results = json.loads(file.read_text())["parts"]
    assert results.pop("an older part") == {"state": "ok"}
    assert [name for name, one in results.items() if one["state"] != "ok"] == [], done.stdout
    assert all(f"\n{name} " in done.stdout for name in names)
    return {name: one["document"]["measured"] for name, one in results.items()}


def test_the_name_of_any_device_names_a_file() -> None:
    assert file_name("NVIDIA H100 80GB HBM3") == "NVIDIA_H100_80GB_HBM3.json"
    assert file_name("../x (y)") == ".._x_y_.json"


def test_a_measurement_that_fails_leaves_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Bench) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("benchmarks.llm_cuda.measure_prefill", fail)
    names = ["decode", "prefill"]
    bench = Bench.of(torch.device("cpu"), names, rounds=1, tiny=True)
    with pytest.raises(RuntimeError, match="no memory"):
        measured_document(bench, names, tmp_path / "document")
    assert {"decode_1", "decode_4"} <= json.loads((tmp_path / "document").read_text())["measured"].keys()


@pytest.mark.slow
def test_the_gpu_tests_of_a_file_that_crashes_are_told_by_name(tmp_path: Path) -> None:
    """What passed and failed before counts."""
    body = "import os, pytest\npytestmark = pytest.mark.gpu\ndef test_passes(): pass\n"
    file = tmp_path / "test_bad.py"
    file.write_text(
        f"{body}def test_fails():\n    assert 1 == 2\ndef test_dies():\n    os.abort()\ndef test_never(): pass\n"
    )
    every = AllResults("cpu", {}, None)
    every.run(str(file))
    assert [name.rpartition("::")[2] for name in every.document["passed"]] == ["test_passes"]
    tests = every.document["measured"]["tests"]
    failures = {one["test"].rpartition("::")[2]: one["reason"] for one in tests.pop("failures")}
    assert tests == {"passed": 1, "failed": 1, "crashed": 1, "not run": 1}
    assert failures.keys() == {"test_fails", "test_dies"}
    assert "SIGABRT" in failures["test_dies"]


def test_transformers_gets_the_weights_of_merged_layers() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    merge_linear_layers(model, lambda: model(torch.tensor([[1, 2]])))
    assert model.state_dict().keys() < expected.keys()
    torch.testing.assert_close(unmerged(model), expected, rtol=0, atol=0)


def test_every_file_with_a_gpu_test_is_found() -> None:
    found = [Path(file).name for file in files_with_gpu_tests(parts_module.TREE / "tests")]
    assert {"test_cuda_graphs.py", "test_cache_size.py"} <= set(found)
    assert found[-1] == "test_language_families.py"
    assert Path(__file__).name not in found


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_each_test_is_in_one_shard(num_shards: int) -> None:
    tests: list[Any] = list(range(7))
    kept = []
    for index in range(num_shards):
        own = tests.copy()
        Results(None, (index, num_shards)).pytest_collection_modifyitems(own)
        kept += own
    assert kept == tests


def test_overlapping_kernels_are_busy_once() -> None:
    assert busy_time([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0
    assert busy_time([]) == 0.0
