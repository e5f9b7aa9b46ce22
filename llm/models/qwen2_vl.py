"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a token has three rotary positions, in time, height and width."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.llm.models.family import LanguageFamily
from raylens.llm.prompt_layout import PromptLayout
from raylens.preprocess.schema import InvalidRequestError, LanguageInputs, ProcessedPrompt

_TEXT, _IMAGE, _VIDEO = 0, 1, 2
_GRIDS = {"image_grid_thw": _IMAGE, "video_grid_thw": _VIDEO}


def _layout(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    """Returns the rotary positions that the model itself computes from the items' grids of patches. As in `generate`,
    each axis continues from the prompt's last token. The model's own `rope_deltas` continue from the largest position
    of the prompt, often a position of a video's last frame."""
    num_tokens = len(prompt.prompt_token_ids)
    token_types = torch.full((1, num_tokens), _TEXT, dtype=torch.int)
    for placeholder, inputs in zip(prompt.placeholders, prompt.language_inputs, strict=True):
        token_types[0, list(placeholder.embed_positions())] = _grid(inputs)[0]
    _check_grids(model.config, token_types, prompt)
    batch, _ = model.model.get_rope_index(
        torch.tensor([prompt.prompt_token_ids]), mm_token_type_ids=token_types, **_merged(prompt.language_inputs)
    )
    positions = batch[:, 0]
    return PromptLayout(
        rope_positions=positions.numpy(),
        rope_offsets=tuple((positions[:, -1] + 1 - num_tokens).tolist()),
        # Directly after an item, generated text has other positions than text of a longer prompt.
        is_prefix_cacheable=bool(token_types[0, -1] == _TEXT),
    )


def _grid(inputs: LanguageInputs) -> tuple[int, list[int]]:
    """Returns an item's modality and its patches in time, height and width."""
    ((modality, grid),) = ((modality, inputs[name][0]) for name, modality in _GRIDS.items() if name in inputs)
    return modality, grid.tolist()


def _merged(language_inputs: list[LanguageInputs]) -> dict[str, torch.Tensor]:
    """Returns each language input by name, concatenated over the items that have it, in prompt order."""
    merged: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for inputs in language_inputs for name in inputs):
        merged[name] = torch.from_numpy(np.concatenate([one[name] for one in language_inputs if name in one]))
    return merged


def _check_grids(config: PreTrainedConfig, token_types: torch.Tensor, prompt: ProcessedPrompt) -> None:
    """Raises InvalidRequestError unless the runs of placeholders match the items' grids. The model does not check this:
    it would merge two adjacent items without a token between them."""
    runs = [(kind, len(list(run))) for kind, run in groupby(token_types[0].tolist()) if kind != _TEXT]
    if runs != [run for inputs in prompt.language_inputs for run in _expected_runs(config, inputs)]:
        raise InvalidRequestError("the items do not fit their placeholders in the prompt", field="messages")


def _expected_runs(config: PreTrainedConfig, inputs: LanguageInputs) -> Iterator[tuple[int, int]]:
    modality, (time, height, width) = _grid(inputs)
    num_embeds = height * width // config.vision_config.spatial_merge_size**2
    if modality == _VIDEO and config.model_type.startswith("qwen3_vl"):
        yield from [(modality, num_embeds)] * time  # a run for each frame, because timestamps separate the frames
    else:
        yield modality, time * num_embeds


_family = partial(LanguageFamily, unused=("model.visual",), layout=_layout, num_rope_axes=3)
QWEN2_VL = _family(whole="Qwen2VLForConditionalGeneration")
QWEN2_5_VL = _family(whole="Qwen2_5_VLForConditionalGeneration")
_with_deepstack = partial(
    _family, num_deepstack_levels=lambda config: len(config.vision_config.deepstack_visual_indexes)
)
QWEN3_VL = _with_deepstack(whole="Qwen3VLForConditionalGeneration")
QWEN3_VL_MOE = _with_deepstack(whole="Qwen3VLMoeForConditionalGeneration")
