"""Which adapter a request names: plain values, without torch."""

from dataclasses import dataclass

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
NO_SLOT = -1
"""In place of an adapter's slot in memory, for a row without an adapter."""


@dataclass(frozen=True, slots=True)
class LoraRequest:
    """An adapter, as PEFT saves it. Equal ones are the same adapter: they share its place in memory and its prefixes.

    `folder`: holds CONFIG_FILE and WEIGHTS_FILE.
    `version`: changes when these files do, so that an adapter that was replaced on disk is another one.
    """

    name: str
    folder: str
    version: str = ""


class LoraError(Exception):
    """An adapter cannot be served. The message names the adapter, and the file, field, value and limit in question."""
