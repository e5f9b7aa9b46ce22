"""The adapter of a request, as plain values without torch."""

from dataclasses import dataclass

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
NO_SLOT = -1
"""The slot of a row without an adapter."""


@dataclass(frozen=True, slots=True)
class LoraRequest:
    """An adapter in PEFT's format. Equal requests share the adapter's slot in memory and its cached prefixes.

    `folder`: holds CONFIG_FILE and WEIGHTS_FILE.
    `version`: changes with these files, so that an adapter replaced on disk counts as another one."""

    name: str
    folder: str
    version: str = ""


class LoraError(Exception):
    """An adapter cannot be served. The message names the adapter, and the file, field, value and limit in question."""
