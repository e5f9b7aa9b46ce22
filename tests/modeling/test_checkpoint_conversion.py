"""Copies of checkpoints with other names of weights: equal to the bit, all of them or none."""

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from raylens.modeling import load_progress
from raylens.modeling.checkpoint_conversion import MODEL_RENAMINGS, ConversionError, convert_checkpoint
from raylens.modeling.checkpoint_files import INDEX_NAME
from raylens.modeling.load_progress import told_progress

ROOT = Path(__file__).parent.parent.parent
RENAME = MODEL_RENAMINGS["wemm"]
LAYER = "language_model.model.layers.0.attention.wqkv"
CONVERT = [sys.executable, "-m", "raylens", "convert", "wemm"]


def weights_of(number: int) -> dict[str, torch.Tensor]:
    """Of all dtypes and shapes that a file may hold, numbers that are none among them."""
    generator = torch.Generator().manual_seed(number)
    wqkv = torch.randn(8, 4, generator=generator).bfloat16()
    wqkv[0, 0] = torch.nan
    layer = LAYER.replace(".0.", f".{number}.")
    return {
        f"{layer}.original_linear.weight": wqkv,
        f"{layer}.Plora_A.weight": torch.randn(2, 4, generator=generator).half(),
        f"{layer}.Plora_B.weight": torch.randn(8, 2, generator=generator),
        f"empty.{number}": torch.empty(0, 3),
        f"step.{number}": torch.tensor(number, dtype=torch.int64),
        f"mask.{number}": torch.tensor([True, False]),
    }


def save_index(folder: Path, name: str, places: dict[str, str]) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of three files of weights, with files that belong to it and such as do not."""
    folder = tmp_path / "source"
    (folder / "assets").mkdir(parents=True)
    places: dict[str, str] = {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(weights_of(number), folder / name)
        places |= dict.fromkeys(weights_of(number), name)
    save_index(folder, INDEX_NAME, places)
    (folder / "config.json").write_text('{"model_type": "wemm"}')
    (folder / "assets" / "picture.txt").write_text("a picture")
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "pytorch_model.bin",
    ):  # of which the last is the weights once more
        (folder / name).write_bytes(b"not read")
    return folder


def names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def bits(weights: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (one.dtype, one.shape, one.reshape(-1).view(torch.uint8).tolist()) for name, one in weights.items()}


def test_a_copy_has_other_names_and_the_same_bits(source: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    before = {name: (source / name).read_bytes() for name in names(source)}
    convert_checkpoint(source, target := tmp_path / "copy", RENAME, say=lines.append)
    shards = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    assert names(target) == {"config.json", "assets/picture.txt", INDEX_NAME, *shards}
    index = json.loads((target / INDEX_NAME).read_text())
    for number, shard in enumerate(shards):
        weights = load_file(target / shard)
        assert bits(weights) == bits({RENAME(name): one for name, one in weights_of(number).items()})
        assert f"language_model.model.layers.{number}.attention.wqkv.weight" in weights
        assert {name for name, place in index["weight_map"].items() if place == shard} == weights.keys()
    assert index["metadata"]["total_size"] == sum(one.nbytes for n in range(3) for one in weights_of(n).values())
    assert [line.split(":")[0] for line in lines] == [f"{number} of 3 files of weights" for number in (1, 2, 3)]
    assert {name: (source / name).read_bytes() for name in names(source)} == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "copy"}


def test_a_long_conversion_tells_how_far_it_is(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_progress, "_FIRST_SECONDS", 0.0)
    lines: list[str] = []
    with told_progress(lines.append):
        convert_checkpoint(source, tmp_path / "copy", RENAME)
    assert re.fullmatch(r"written and read back: \S+ of \S+B, 0 s, \S+ left", lines[0])


def test_weights_that_share_memory_are_stored_once(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    (source / "config.json").write_text("{}")
    whole = torch.arange(32.0).reshape(8, 4)
    part = whole[2:4]
    torch.save({"output.weight": whole, "tok_embeddings.weight": whole, "part": part}, source / "pytorch_model.bin")
    convert_checkpoint(source, target, RENAME)
    with safe_open(target / "model.safetensors", framework="pt") as stored:
        assert set(stored.keys()) == {"output.weight", "part"}
        assert stored.metadata() == {"format": "pt", "tok_embeddings.weight": "output.weight"}
        assert torch.equal(stored.get_tensor("output.weight"), whole)
        assert torch.equal(stored.get_tensor("part"), part)
    assert names(target) == {"config.json", "model.safetensors"}


def test_weights_that_were_stored_once_are_still_known_by_both_names(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    (source / "config.json").write_text("{}")
    metadata = {"format": "pt", "b.original_linear.weight": "a.original_linear.weight"}
    save_file({"a.original_linear.weight": torch.ones(3)}, source / "model.safetensors", metadata)
    convert_checkpoint(source, target, RENAME)
    with safe_open(target / "model.safetensors", framework="pt") as stored:
        assert stored.metadata() == {"format": "pt", "b.weight": "a.weight"}


def test_an_empty_folder_may_be_the_target(source: Path, tmp_path: Path) -> None:
    (target := tmp_path / "copy").mkdir()
    convert_checkpoint(source, target, RENAME)
    assert INDEX_NAME in names(target)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("source", "cannot be in the folder"),
        ("source/copy", "cannot be in the folder"),
        ("link/copy", "cannot be in the folder"),
        (".", "the folder that the copy is made of is in it"),
        ("full", "not an empty folder"),
        ("full/file", "not an empty folder"),
        ("no/copy", "is no folder"),
        ("taken", "in the way"),
    ],
)
def test_bad_targets_are_refused(source: Path, tmp_path: Path, target: str, reason: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    (tmp_path / "taken.unfinished").mkdir()
    (tmp_path / "link").symlink_to(source)
    before = names(tmp_path)
    with pytest.raises(ConversionError, match=reason):
        convert_checkpoint(source, tmp_path / target, RENAME)
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda source: (source / "config.json").unlink(), "no config.json"),
        (lambda source: [file.unlink() for file in source.glob("*model*")], "no files of weights"),
        (lambda source: (source / "model-00003-of-00003.safetensors").unlink(), "model-00003-of-00003.* is missing"),
        (lambda source: (source / INDEX_NAME).write_text("[]"), "does not list files"),
        (lambda source: (source / "model-00003-of-00003.safetensors").write_bytes(b"x" * 100), "cannot be read"),
        (
            lambda source: save_file(
                {"a.weight": torch.ones(1), "a.original_linear.weight": torch.ones(1)},
                source / "model-00002-of-00003.safetensors",
            ),
            "two weights would have the name a.weight",
        ),
    ],
    ids=["no config", "no weights", "a file missing", "no index", "a broken file", "one name twice"],
)
def test_bad_sources_are_refused_and_leave_nothing(source: Path, tmp_path: Path, spoil: object, reason: str) -> None:
    assert callable(spoil)
    spoil(source)
    with pytest.raises(ConversionError, match=reason):
        convert_checkpoint(source, tmp_path / "copy", RENAME)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_weights_that_were_not_written_as_read_are_seen(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_wrong(weights: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        save_file({name: torch.zeros_like(weight) for name, weight in weights.items()}, file, metadata)

    monkeypatch.setattr("raylens.modeling.checkpoint_conversion.save_file", save_wrong)
    with pytest.raises(ConversionError, match="was not written as it was read"):
        convert_checkpoint(source, tmp_path / "copy", RENAME)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_full_disk_is_one_line(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("raylens.modeling.checkpoint_conversion.save_file", no_room)
    with pytest.raises(ConversionError, match="No space left on device"):
        convert_checkpoint(source, tmp_path / "copy", RENAME)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ConversionError, match=r"the weights take \d+ bytes, the disk has 1$"):
        convert_checkpoint(source, tmp_path / "copy", RENAME)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.fixture
def large_source(tmp_path: Path) -> Path:
    """Six files of 48 MiB each."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in range(6):
        weights = {f"{number}.{part}.original_linear.weight": torch.randn(3 * 2**20) for part in range(4)}
        save_file(weights, folder / f"model-{number + 1:05}-of-00006.safetensors")
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_whoever_stops_it_halfway_finds_nothing_that_looks_finished(
    large_source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    target = tmp_path / "copy"
    command = [*CONVERT, str(large_source), str(target)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("1 of 6 files of weights: model-00001-of-00006.safetensors, ")
        process.send_signal(number)
    assert not target.exists()
    left = {path.name for path in tmp_path.iterdir()} - {"source"}
    assert left == ({"copy.unfinished"} if number == signal.SIGKILL else set())
    assert subprocess.run(command, cwd=ROOT, check=True).returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"source", "copy"}
    assert len(names(target)) == 8


MEASURED = """
import sys
from pathlib import Path
from raylens.modeling.checkpoint_conversion import MODEL_RENAMINGS, convert_checkpoint
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
import torch, safetensors.torch
before = peak()
convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), MODEL_RENAMINGS["wemm"])
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_more_than_a_file_of_weights_is_in_memory(large_source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURED, str(large_source), str(tmp_path / "copy")]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # The pages of the file that is read, and of its copy that is read back.
    assert int(output.splitlines()[-1]) < 2.5 * 48 * 2**20


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    command = [*CONVERT, str(tmp_path / "none"), str(tmp_path / "copy")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.fullmatch(r"raylens: \S+/none: no checkpoint, it has no config.json\n", result.stderr)
    help_ = subprocess.run([*CONVERT[:-1], "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "raylens convert wemm" in help_
