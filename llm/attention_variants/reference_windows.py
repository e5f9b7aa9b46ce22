"""Layers in which a token of an answer sees the whole prompt, and a window of the answer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from raylens.llm.attention import AttentionBackend, AttentionCall, LayerShape
from raylens.llm.attention_variants.chosen_positions import ChoosingBackend, ChosenPositions, ChosenStep, positions_of
from raylens.llm.layer_types import INDEXED, REFERENCE, layer_types
from raylens.llm.step_input import StepInput


class ReferenceWindows:
    """The windows of a decoder, for steps on `block_size` slots a block."""

    def __init__(self, decoder: nn.Module, text_config: Any, block_size: int) -> None:
        self._window: int = text_config.sliding_window
        self._block_size = block_size
        self.inputs: dict[str, Any] = {}
        self.shapes: list[LayerShape] = []
        for module in decoder.modules():
            index = getattr(module, "layer_idx", None)
            if index is not None and text_config.layer_types[index] in REFERENCE:
                module.has_reference_window = True  # type: ignore[assignment]

    @contextmanager
    def of(self, step: StepInput, attention: AttentionBackend) -> Iterator[ChosenStep]:
        """Yields the attention of `step`."""
        assert isinstance(attention, ChoosingBackend)
        chosen = positions_of(step, self._block_size)
        for chunk, prompt_length in zip(chosen, step.prompt_lengths, strict=True):
            chunk.mask = self._mask(chunk, prompt_length)
        yield ChosenStep(attention, chosen)

    def _mask(self, chunk: ChosenPositions, prompt_length: int) -> torch.Tensor:
        end = len(chunk.slots)
        positions = torch.arange(end, device=chunk.slots.device)
        queries = positions[end - (chunk.rows.stop - chunk.rows.start) :, None]
        return (positions <= queries) & ((positions < prompt_length) | (positions > queries - self._window))


def check_choices(calls: Sequence[AttentionCall], text_config: PreTrainedConfig) -> None:
    """Raises ValueError unless as many layers see chosen positions only as the configuration has such layers. `calls`:
    see `probe_layers`."""
    expected = [kind for kind in layer_types(text_config) if kind in INDEXED | REFERENCE]
    if (num_found := sum(call.sees_chosen for call in calls)) != len(expected):
        problem = f"{num_found} layers choose positions, {len(expected)} are of types {sorted(set(expected))}"
        raise ValueError(f"text models of type {text_config.model_type} are not supported: {problem}")
