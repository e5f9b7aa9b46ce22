"""What the processor has to be told about a model family."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessorFamily:
    """`item_fields`: the outputs of the Hugging Face image processor that hold one row an item on axis 0."""

    item_fields: tuple[str, ...]
