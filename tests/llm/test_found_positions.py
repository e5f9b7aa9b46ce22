"""Positions of a found model: its `get_rope_index` gets the kind of each token, and the lengths of sounds."""

from typing import Any

import numpy as np
import torch
from torch import nn

from raylens.llm.models.found import _layout
from raylens.preprocess.schema import PlaceholderRange, ProcessedPrompt


class Positions(nn.Module):
    def get_rope_index(
        self, input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor, audio_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        self.lengths = audio_seqlens.tolist()
        return mm_token_type_ids.unsqueeze(0), None


def test_a_sound_beside_a_picture_is_an_item_of_another_kind() -> None:
    model: Any = nn.Module()
    model.inner = Positions()
    items = [PlaceholderRange(1, 2), PlaceholderRange(3, 3), PlaceholderRange(7, 1)]
    inputs: list[Any] = [{"image_grid_thw": np.ones((1, 3))}, {"audio_seqlens": np.array([9])}]
    inputs.append({"audio_seqlens": np.array([4])})
    layout = _layout("inner", 1, model, ProcessedPrompt(list(range(9)), items, ["a", "b", "c"], inputs))
    assert layout.rope_positions is not None
    assert layout.rope_positions.tolist() == [[0, 1, 1, 3, 3, 3, 0, 3, 0]]
    assert model.inner.lengths == [9, 4]
