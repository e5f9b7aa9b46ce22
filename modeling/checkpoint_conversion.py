"""Writes a copy of a checkpoint with renamed weights, one file of weights after the other.

The copy is written to a folder beside its target and renamed once all of it is written and verified. A folder with the
target's name is therefore always complete, even if a conversion is interrupted."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tqdm.std import tqdm

from raylens.modeling.checkpoint_files import INDEX_NAME

Rename = Callable[[str], str]
MODEL_RENAMINGS: dict[str, Rename] = {
    "wemm": lambda name: name.replace(".original_linear.", "."),
    "safetensors": lambda name: name,
}
"""By kind of conversion, the renaming of weights. WeMM's published files add an infix to all weights with a LoRA."""

_WEIGHTS = {".safetensors": INDEX_NAME, ".bin": "pytorch_model.bin.index.json"}
"""The suffixes of files of weights, in order of preference, each with the name of its index of several files."""
_TRAINING_SUFFIXES = (".pt", ".pth")
_TRAINING_STATE = re.compile(r"arguments|args|training")
_MARK = ".raylens-conversion"
"""A file in the folder of an unfinished copy. A folder without it is never deleted."""


class ConversionError(ValueError):
    """The checkpoint cannot be converted. The message names the folder, file or weight."""


def convert_checkpoint(source: Path, target: Path, rename: Rename, say: Callable[[str], None] = print) -> None:
    """Copies the folder `source` to `target`, a new or empty folder. `rename` maps the name of each weight.

    Weights become safetensors files. Weights with shared memory are stored once, and the file's metadata maps each
    dropped name to the kept one. Every weight is read back and compared bit by bit. All other files are copied, except
    for training state. Only one file of weights is in memory at a time.

    Raises ConversionError, and leaves no files behind, if the source is no checkpoint, the target is no new folder
    outside of it, the disk is full, or two weights would have the same name."""
    shards = _find_shards(source)
    _check_target(source, target)
    _check_room(shards, target)
    size = 2 * sum(file.stat().st_size for file in shards)
    bar = tqdm(total=size, desc="written and read back", unit="B", unit_scale=True, leave=False)
    with _unfinished(target) as folder, bar:
        try:
            places: dict[str, str] = {}
            num_bytes = 0
            for number, (file, name) in enumerate(shards.items(), start=1):
                num_bytes += _convert_shard(file, folder / name, rename, places, bar.update)
                say(f"{number} of {len(shards)} files of weights: {name}, {num_bytes / 2**30:.2f} GiB so far")
            if len(shards) > 1:
                index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))}
                (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
            _copy_other_files(source, folder)
        except OSError as error:
            raise ConversionError(f"{target}: {error.strerror or error}") from error


def _find_shards(source: Path) -> dict[Path, str]:
    """Returns the files of weights, each with its name in the copy."""
    if not (source / "config.json").is_file():
        raise ConversionError(f"{source}: no checkpoint, it has no config.json")
    for suffix, index in _WEIGHTS.items():
        files = [file for file in sorted(source.glob(f"*{suffix}")) if not _TRAINING_STATE.search(file.name)]
        if (source / index).is_file():
            files = _listed(source / index)
        if files:
            return {file: re.sub(r"^pytorch_model", "model", file.stem) + ".safetensors" for file in files}
    raise ConversionError(f"{source}: it has no files of weights")


def _listed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [index.with_name(name) for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{index}: it does not list files of weights") from error
    for file in files:
        if not file.is_file():
            raise ConversionError(f"{index}: it lists {file.name}, which is missing")
    return files


def _check_target(source: Path, target: Path) -> None:
    real_source, real_target = source.resolve(), target.resolve()
    if real_target == real_source or real_source in real_target.parents:
        raise ConversionError(f"{target}: the copy cannot be in the folder that it is made of")
    if real_target in real_source.parents:
        raise ConversionError(f"{target}: the folder that the copy is made of is in it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target}: it is there already and not an empty folder")
    if not real_target.parent.is_dir():
        raise ConversionError(f"{target}: {real_target.parent} is no folder")


def _check_room(files: Iterable[Path], target: Path) -> None:
    wanted = sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(target.resolve().parent).free
    if wanted > free:
        raise ConversionError(f"{target}: the weights take {wanted} bytes, the disk has {free}")


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Yields a folder for the copy. It is renamed to `target` after the block, or deleted if the block fails.

    The folder of an earlier, killed conversion is deleted first."""
    place = target.resolve()
    folder = place.with_name(f"{place.name}.unfinished")
    if folder.exists():
        if not (folder / _MARK).is_file():
            raise ConversionError(f"{folder}: it is in the way, and not from an earlier conversion")
        shutil.rmtree(folder)
    try:
        folder.mkdir()
        (folder / _MARK).touch()
        yield folder
        (folder / _MARK).unlink()
        folder.rename(place)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _convert_shard(
    source: Path, target: Path, rename: Rename, places: dict[str, str], tell: Callable[[int], object]
) -> int:
    """Writes the file's weights, notes the file of each in `places`, and returns their bytes. `tell` gets the bytes
    that were written and, once more, those that were read back."""
    stored, notes = _read(source)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in stored.items():
        new_name = rename(name)
        if new_name in weights or new_name in places:
            raise ConversionError(f"{source.name}: two weights would have the name {new_name}")
        weights[new_name] = weight
    kept, dropped = _without_shared(weights)
    # The source's metadata maps the dropped names of shared weights to the kept ones.
    notes = {rename(key): rename(value) if value in stored else value for key, value in notes.items()}
    save_file(kept, target, metadata={"format": "pt", **notes, **dropped})
    with target.open("rb") as opened:
        os.fsync(opened.fileno())  # before it is read back
    num_bytes = sum(weight.nbytes for weight in kept.values())
    tell(num_bytes)
    _compare(target, kept, tell)
    places.update(dict.fromkeys(kept, target.name))
    return num_bytes


def _read(file: Path) -> tuple[Mapping[str, torch.Tensor], Mapping[str, str]]:
    """Returns the weights and the metadata of a file."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                notes = opened.metadata() or {}
            return load_file(file), notes
        weights: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise ConversionError(f"{file}: it cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(weights, dict) or not all(isinstance(weight, torch.Tensor) for weight in weights.values()):
        raise ConversionError(f"{file}: it holds something else than weights by name")
    return weights, {}


def _without_shared(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns the weights, each once and contiguous, and the kept name for each dropped name."""
    kept: dict[str, torch.Tensor] = {}
    dropped: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, weight in weights.items():
        place = (weight.data_ptr(), weight.dtype, tuple(weight.shape), weight.stride())
        if weight.numel() and place in first:
            dropped[name] = first[place]
        else:
            first[place] = name
            # safetensors needs a separate copy of a part of another weight's memory.
            is_whole = weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes
            kept[name] = weight if is_whole else weight.clone(memory_format=torch.contiguous_format)
    return kept, dropped


def _compare(file: Path, weights: Mapping[str, torch.Tensor], tell: Callable[[int], object]) -> None:
    with safe_open(file, framework="pt") as stored:
        for name, weight in weights.items():
            copy = stored.get_tensor(name)
            is_same = copy.dtype == weight.dtype and copy.shape == weight.shape
            if not is_same or not torch.equal(_bits(copy), _bits(weight)):
                raise ConversionError(f"{file.name}: {name} was not written as it was read; the disk may be faulty")
            tell(weight.nbytes)


def _bits(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight's bytes, because NaN numbers would not equal themselves."""
    return weight.reshape(-1).view(torch.uint8)


def _copy_other_files(source: Path, folder: Path) -> None:
    for item in sorted(source.iterdir()):
        if item.is_dir():
            if item.name != ".git":
                shutil.copytree(item, folder / item.name)
        elif item.suffix not in (*_WEIGHTS, *_TRAINING_SUFFIXES) and item.name not in _WEIGHTS.values():
            shutil.copy2(item, folder / item.name)
