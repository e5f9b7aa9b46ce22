"""Mllama (Llama 3.2 Vision): some layers attend to the features of pictures, which are no tokens of the decoder."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from raylens.llm.models.family import CrossFamily, LanguageFamily
from raylens.llm.states.cross_source import CrossSource, CrossView
from raylens.preprocess.schema import ProcessedPrompt


def _split(model: PreTrainedModel, prompt: ProcessedPrompt) -> tuple[ProcessedPrompt, CrossSource]:
    """Leaves one token of each picture to the decoder. The states of all pictures' tiles come first, those of all
    padding tiles last, so that a token sees consecutive ones."""
    token_ids = list(prompt.prompt_token_ids)
    max_tiles: int = model.config.vision_config.max_num_tiles
    own: list[int] = []
    at: list[int] = []
    end = 0
    for placeholder in prompt.placeholders:
        own += token_ids[end : placeholder.offset + 1]
        at.append(len(own) - 1)
        end = placeholder.offset + placeholder.length
    own += token_ids[end:]
    num_states = [placeholder.length for placeholder in prompt.placeholders]
    shares = [float(inputs["aspect_ratio_mask"].mean()) for inputs in prompt.language_inputs]
    assert all(number % max_tiles == 0 for number in num_states), "a picture has the same number of features a tile"
    num_seen = [round(number * share) for number, share in zip(num_states, shares, strict=True)]
    ends = np.cumsum([0, *num_seen]).tolist()
    padded = np.cumsum([ends[-1], *(total - seen for total, seen in zip(num_states, num_seen, strict=True))]).tolist()
    positions = [
        [*range(ends[index], ends[index + 1]), *range(padded[index], padded[index + 1])] for index in range(len(at))
    ]
    source = CrossSource(sum(num_states), (), len(token_ids), positions, _views(at, ends, padded[-1]))
    return replace(prompt, prompt_token_ids=own, placeholders=[]), source


def _views(at: Sequence[int], ends: Sequence[int], num_states: int) -> list[CrossView]:
    """Returns what tokens see: the pictures of the last run of adjacent ones up to them. Tokens before all pictures see
    everything, padding, too: transformers' mask for no state at all is one for all states.

    `at`: the positions of pictures. `ends`: of their states, from 0."""
    views = [CrossView(0, 0, num_states, is_own=False)]
    first = 0
    for index, position in enumerate(at):
        if index and position != at[index - 1] + 1:
            first = index
        views.append(CrossView(position, ends[first], ends[index + 1], is_own=True))
    return views


def _row_mask(is_own: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"full_text_row_masked_out_mask": is_own[None, None, :, None]}


MLLAMA = LanguageFamily(
    whole="MllamaForConditionalGeneration",
    unused=("model.vision_model", "model.multi_modal_projector"),
    cross=CrossFamily(attention="cross_attn", states="cross_attention_states", split=_split, inputs_of_rows=_row_mask),
)
