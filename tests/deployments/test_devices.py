"""`raylens serve` takes the GPUs of a machine. A script stands in for `nvidia-smi`, and a folder for a CUDA build of
PyTorch, of which the command reads the version file alone."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.config_file import ConfigError
from raylens.deployments.launch.devices import Gpu, NoGpuError, choose_devices, find_gpus, placed

RAYLENS = Path(sys.executable).with_name("raylens")


def cards(number: int, gib: float = 80) -> list[Gpu]:
    return [Gpu(f"GPU-{index}", "card", int(gib * 2**30)) for index in range(number)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-ins: a machine with two GPUs of 143,771 MiB."""
    lines = "".join(f"{index}, GPU-{letter}, NVIDIA H200, 143771\n" for index, letter in enumerate("ab"))
    write_nvidia_smi(tmp_path, f"printf '{lines}'".replace("\n", "\\n"))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    write_torch(tmp_path, "13.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def write_nvidia_smi(folder: Path, command: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{command}\n")
    (folder / "nvidia-smi").chmod(0o755)


def write_torch(folder: Path, cuda: str | None) -> None:
    (folder / "torch" / "version.py").write_text(f"cuda = {cuda!r}\n")


def serve(*arguments: str) -> tuple[int, list[str], str]:
    """Runs `raylens serve` until it starts Ray or ends. Returns its exit status, its lines and its error."""
    command = [str(RAYLENS), "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            if line == "starting Ray\n":
                process.terminate()
                break
            lines.append(line.rstrip())
        _, errors = process.communicate(timeout=60)
    return process.returncode, lines, errors


def test_it_takes_the_gpus_and_says_so(machine: Path) -> None:
    assert serve()[1] == [
        "Encode on 1 GPU, Generate on 1 GPU, of 2 GPUs (NVIDIA H200, 140.4 GiB); --device cpu takes none"
    ]


def test_one_gpu_is_shared(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "Encode on 0.05 GPU, Generate on 0.95 GPU, of 1 GPU (NVIDIA H200, 140.4 GiB); --device cpu takes none"
    assert serve("--num-gpus", "1")[1] == [shared]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert serve("--device", "cuda")[1] == [shared]


def test_the_cpu_is_a_choice(machine: Path) -> None:
    assert serve("--device", "cpu")[1] == ["Encode and Generate on the CPU"]


def test_what_is_set_stays(machine: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("applications: [{args: {generate: {num_gpus: 0.5}}}]")
    assert serve("--config", str(file))[1] == ["Encode on the CPU, Generate on 0.5 GPU, as set"]
    file.write_text("applications: [{args: {generate: {num_gpus: 0}}}]")
    assert serve("--config", str(file))[1] == ["Encode and Generate on the CPU, as set"]
    assert serve("--config", str(file), "--device", "cuda")[1][0].startswith(
        "Encode on 1 GPU, Generate on 1 GPU, of 2 GPUs"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "--device cuda: no GPU: there is no nvidia-smi"),
        (["--num-gpus", "1"], "--num-gpus 1: no GPU: there is no nvidia-smi"),
        (["--num-gpus", "0"], "--num-gpus: 0 is not above 0; --device cpu takes no GPU"),
        (["--device", "cpu", "--num-gpus", "1"], "--device cpu takes no GPU, but --num-gpus is 1"),
        (["--device", "cuda", "--set", "generate.num_gpus=0"], "--device and --set generate.num_gpus"),
    ],
)
def test_a_start_without_a_gpu_fails_before_ray(machine: Path, arguments: list[str], message: str) -> None:
    (machine / "nvidia-smi").unlink()
    status, lines, errors = serve(*arguments)
    assert (status, lines) == (2, [])
    assert message in errors
    assert "Traceback" not in errors


def test_a_machine_without_a_gpu_says_so(machine: Path) -> None:
    (machine / "nvidia-smi").unlink()
    assert serve()[1] == ["Encode and Generate on the CPU: no GPU: there is no nvidia-smi"]


def test_gpus_are_found(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(machine)
    assert [gpu.uuid for gpu in find_gpus()] == ["GPU-a", "GPU-b"]
    assert find_gpus()[0].memory_bytes == 143771 * 2**20
    for visible, expected in (("1,0", ["GPU-b", "GPU-a"]), ("GPU-b", ["GPU-b"]), ("0,7,1", ["GPU-a"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.uuid for gpu in find_gpus()] == expected


@pytest.mark.parametrize(
    ("visible", "torch", "script", "reason"),
    [
        ("", "13.0", None, "CUDA_VISIBLE_DEVICES is ''"),
        ("-1", "13.0", None, "CUDA_VISIBLE_DEVICES is '-1'"),
        (None, None, None, "PyTorch is a build without CUDA"),
        (None, "13.0", "echo no driver; exit 9", "nvidia-smi: no driver"),
        (None, "13.0", "exit 9", "nvidia-smi: status 9"),
        (None, "13.0", "echo '0, GPU-a, card, [N/A]'", "nvidia-smi: 0, GPU-a, card, [N/A]"),
        (None, "13.0", "true", "nvidia-smi shows none"),
        (None, "13.0", "exec sleep 60", "nvidia-smi does not answer"),
    ],
)
def test_the_reason_for_no_gpu_is_told(
    visible: str | None,
    torch: str | None,
    script: str | None,
    reason: str,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(machine)
    monkeypatch.setattr("raylens.deployments.launch.devices._ANSWER_SECONDS", 0.5)
    write_torch(machine, torch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if script is not None:
        write_nvidia_smi(machine, script)
    with pytest.raises(NoGpuError) as told:
        find_gpus()
    assert reason in str(told.value)


def shares(config: AppConfig) -> list[tuple[str, float, float]]:
    return [(one.encode.placement, one.encode.num_gpus, one.generate.num_gpus) for one in config.models]


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ({}, cards(1, 140), [("separate", 0.05, 0.95)]),
        ({}, cards(1, 80), [("separate", 0.1, 0.9)]),
        ({}, cards(1, 47.5), [("separate", 0.15, 0.85)]),
        ({}, cards(1, 23.9), [("inline", 0, 1)]),
        ({"encode": {"placement": "separate"}}, cards(1, 23.9), [("separate", 0.3, 0.7)]),
        ({"encode": {"placement": "inline"}}, cards(2), [("inline", 0, 1)]),
        ({"encode": {"placement": "auto"}}, cards(2), [("auto", 1, 1)]),
        ({"encode": {"activation_bytes": 2**34}}, cards(1, 140), [("separate", 0.15, 0.85)]),
        ({}, cards(2, 24), [("separate", 1, 1)]),
        ({"generate": {"tensor_parallel_size": 2}}, cards(2), [("separate", 0.1, 0.9)]),
        ({"generate": {"tensor_parallel_size": 2}}, cards(3), [("separate", 1, 1)]),
        ({"generate": {"max_replicas": 2}}, cards(2), [("separate", 0.1, 0.9)]),
        ({"further_models": [{"model": "b"}]}, cards(1), [("separate", 0.1, 0.4)] * 2),
        ({"further_models": [{"model": "b"}]}, cards(2), [("separate", 0.1, 0.9)] * 2),
        ({"further_models": [{"model": "b"}]}, cards(4), [("separate", 1, 1)] * 2),
    ],
)
def test_stages_share_gpus_by_their_memory(
    settings: dict[str, Any], gpus: Sequence[Gpu], expected: list[tuple[str, float, float]]
) -> None:
    assert shares(placed(AppConfig.model_validate(settings), gpus)) == expected


def test_a_model_needs_a_gpu_for_each_rank() -> None:
    config = AppConfig.model_validate({"generate": {"tensor_parallel_size": 4}})
    with pytest.raises(
        ConfigError, match=r"generate\.tensor_parallel_size: 4 ranks take 4 GPUs, and there are 2: .*--device cpu"
    ):
        placed(config, cards(2))


def test_a_model_larger_than_its_gpus_stays_on_the_cpu(machine: Path) -> None:
    write_nvidia_smi(machine, "echo 0, GPU-a, small card, 2")
    told = "the weights of shapes take 5.4 MiB of GPU memory, and there are 2.0 MiB"
    assert serve()[1] == [f"Encode and Generate on the CPU: {told}"]
    status, lines, errors = serve("--device", "cuda")
    assert (status, lines, errors) == (2, [], f"raylens: --device cuda: {told}; --device cpu takes no GPU\n")


def test_the_other_gpus_are_hidden(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(machine)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    with pytest.raises(ConfigError, match=r"^--num-gpus 3: this machine has 2 GPUs \(NVIDIA H200, 140.4 GiB\)$"):
        choose_devices(AppConfig(), num_gpus=3)
    config, _ = choose_devices(AppConfig(), num_gpus=1)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], config.generate.num_gpus) == ("GPU-b", 0.95)


def test_settings_for_the_cpu_keep_it(machine: Path) -> None:
    status, lines, _ = serve("--set", "generate.engine.quantization=int8")
    assert (status, len(lines)) == (0, 1)
    assert lines[0].startswith("Encode and Generate on the CPU: generate: ")
    assert "weights are quantized on the CPU only" in lines[0]
    status, lines, errors = serve("--set", "encode.linear=packed", "--device", "cuda")
    assert (status, lines) == (2, [])
    assert "--device cuda: encode.linear: packed is for the CPU only" in errors
