"""The LoRA adapters that are served: the folders below one folder, by their names."""

import os
from pathlib import Path

from llm.lora_request import CONFIG_FILE, WEIGHTS_FILE, LoraRequest
from preprocess.schema import InvalidRequestError

_MAX_NAME_CHARS = 200


class AdapterFolder:
    """Looks into the folder anew each time, so that adapters may come, change and go. Any thread may ask."""

    def __init__(self, path: str) -> None:
        """Raises ValueError unless there is such a folder."""
        self._path = Path(path)
        if not self._path.is_dir():
            raise ValueError(f"generate.adapters_folder: {path} is no folder")

    def names(self) -> tuple[str, ...]:
        """Returns the names of all adapters, in order. Folders whose names no model may have are passed over. Raises
        OSError."""
        with os.scandir(self._path) as entries:
            names = [entry.name for entry in entries if is_adapter_name(entry.name)]
        return tuple(sorted(name for name in names if (self._path / name / CONFIG_FILE).is_file()))

    def find(self, name: str) -> LoraRequest:
        """Returns the adapter as it is now. Raises InvalidRequestError, with status 404, if it is not there."""
        if not is_adapter_name(name) or not (self._path / name / CONFIG_FILE).is_file():
            raise adapter_not_found(name)
        folder = self._path / name
        return LoraRequest(name, str(folder), f"{_state(folder / CONFIG_FILE)} {_state(folder / WEIGHTS_FILE)}")


def is_adapter_name(name: str) -> bool:
    """Returns whether the name is a single part of a path and can be a model's name in the API."""
    return name.isprintable() and 0 < len(name) <= _MAX_NAME_CHARS and name[0] != "." and not set(name) & {"/", "\\"}


def adapter_not_found(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name[:100]!r} is not served here any more", field="model", code="model_not_found", status=404
    )


def _state(path: Path) -> str:
    """Returns what changes when the file does."""
    try:
        state = path.stat()
    except OSError:  # the engine says what is wrong
        return ""
    return f"{state.st_ino}:{state.st_mtime_ns}:{state.st_size}"
