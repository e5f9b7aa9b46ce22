"""A checkpoint with broken files is refused before anything starts, by the name of the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.launch.cli import main
from raylens.modeling.checkpoint_files import why_broken

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def empty(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def pointer(folder: Path) -> None:
    """What a clone without Git LFS has."""
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")


def in_two_files(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    parts = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / file)
    index = {name: file for file, own in parts.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def without_second_file(folder: Path) -> None:
    in_two_files(folder)
    (folder / "two.safetensors").unlink()


def without_a_weight(folder: Path) -> None:
    in_two_files(folder)
    save_file({"other": torch.zeros(1)}, folder / "one.safetensors")


def odd_index(folder: Path) -> None:
    (folder / INDEX).write_text("[]")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without_tokenizer, "tokenizer.json is missing"),
        (without_weights, "model.safetensors is missing"),
        (
            pickled,
            "no pickled weights are read (pytorch_model.bin): `raylens convert safetensors SRC DST`",
        ),
        (cut_off, "model.safetensors is cut off or damaged"),
        (empty, "model.safetensors is cut off or damaged"),
        (pointer, "model.safetensors is cut off or damaged"),
        (without_second_file, f"two.safetensors is missing, and {INDEX} names it"),
        (without_a_weight, "one.safetensors has no "),
        (odd_index, f"{INDEX} is not an index of weights"),
    ],
)
def test_a_broken_file_is_one_line_and_nothing_starts(
    folder: Path,
    damage: Callable[[Path], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("raylens.deployments.launch.cli._stop_on_signals", lambda: None)
    damage(folder)
    assert main(["serve", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"raylens: --model {folder}: ")
    assert reason in line


@pytest.mark.parametrize("change", [lambda _: None, in_two_files])
def test_a_whole_checkpoint_is_taken(folder: Path, change: Callable[[Path], None]) -> None:
    change(folder)
    assert why_broken(folder) is None
