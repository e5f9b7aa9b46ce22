"""The served LoRA adapters: the subfolders of one folder, by name."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from raylens.llm.lora.request import CONFIG_FILE, WEIGHTS_FILE, LoraError, LoraRequest
from raylens.preprocess.schema import InvalidRequestError

logger = logging.getLogger(f"ray.serve.{__name__}")

_MAX_NAME_CHARS = 200


class AdapterFolder:
    """Lists the folder on each call, so adapters may be added, changed and removed at run time. Thread-safe."""

    def __init__(self, path: str, check: Callable[[str], None]) -> None:
        """`check` raises LoraError for a folder that cannot be served. Raises ValueError if `path` is no folder."""
        self._path = Path(path)
        self._check = check
        self._checked: dict[LoraRequest, str | None] = {}
        if not self._path.is_dir():
            raise ValueError(f"generate.adapters_folder: {path} is no folder")

    def look(self) -> dict[str, str | None]:
        """Returns {name: reason why it cannot be served, or None}, sorted. Logs each reason once. Raises OSError."""
        with os.scandir(self._path) as entries:
            names = sorted(entry.name for entry in entries if self._is_adapter(entry.name))
        before, adapters = self._checked, [self._request(name) for name in names]
        self._checked = {one: before[one] if one in before else self._why_refused(one) for one in adapters}
        return {one.name: reason for one, reason in self._checked.items()}

    def find(self, name: str) -> LoraRequest:
        """Returns the adapter's current version. Raises InvalidRequestError with status 404 if it does not exist."""
        if not self._is_adapter(name):
            raise adapter_not_found(name)
        return self._request(name)

    def _is_adapter(self, name: str) -> bool:
        return is_adapter_name(name) and (self._path / name / CONFIG_FILE).is_file()

    def _request(self, name: str) -> LoraRequest:
        folder = self._path / name
        return LoraRequest(name, str(folder), f"{_state(folder / CONFIG_FILE)} {_state(folder / WEIGHTS_FILE)}")

    def _why_refused(self, adapter: LoraRequest) -> str | None:
        try:
            self._check(adapter.folder)
        except LoraError as error:
            logger.warning("adapter %s cannot be served: %s", adapter.name, error)
            return str(error)
        return None


def is_adapter_name(name: str) -> bool:
    """Returns whether the name is a single part of a path and can be a model's name in the API."""
    return name.isprintable() and 0 < len(name) <= _MAX_NAME_CHARS and name[0] != "." and not set(name) & {"/", "\\"}


def adapter_not_found(name: str) -> InvalidRequestError:
    message = f"{name[:100]!r} is not served here any more"
    return InvalidRequestError(message, field="model", code="model_not_found", status=404)


def _state(path: Path) -> str:
    """Returns a fingerprint of the file: inode, mtime and size."""
    try:
        state = path.stat()
    except OSError:  # `check` reports the reason
        return ""
    return f"{state.st_ino}:{state.st_mtime_ns}:{state.st_size}"
