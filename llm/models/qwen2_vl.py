"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: a token has three rotary positions, in time, height and width."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

from transformers import PreTrainedConfig, PreTrainedModel

from raylens.llm.models.family import LanguageFamily
from raylens.llm.models.found import rope_layout
from raylens.llm.prompt_layout import PromptLayout
from raylens.preprocess.schema import InvalidRequestError, LanguageInputs, ProcessedPrompt

_TEXT, _IMAGE, _VIDEO = 0, 1, 2
_GRIDS = {"image_grid_thw": _IMAGE, "video_grid_thw": _VIDEO}


def _layout(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    """Returns the rotary positions that the model itself computes from the items' grids of patches."""
    token_types = [_TEXT] * len(prompt.prompt_token_ids)
    for placeholder, inputs in zip(prompt.placeholders, prompt.language_inputs, strict=True):
        for position in placeholder.embed_positions():
            token_types[position] = _grid(inputs)[0]
    _check_grids(model.config, token_types, prompt)
    return rope_layout(model.model, prompt, token_types)


def _grid(inputs: LanguageInputs) -> tuple[int, list[int]]:
    """Returns an item's modality and its patches in time, height and width."""
    ((modality, grid),) = ((modality, inputs[name][0]) for name, modality in _GRIDS.items() if name in inputs)
    return modality, grid.tolist()


def _check_grids(config: PreTrainedConfig, token_types: Sequence[int], prompt: ProcessedPrompt) -> None:
    """Raises InvalidRequestError unless the runs of placeholders match the items' grids. The model does not check this:
    it would merge two adjacent items without a token between them."""
    runs = [(kind, len(list(run))) for kind, run in groupby(token_types) if kind != _TEXT]
    if runs != [run for inputs in prompt.language_inputs for run in _expected_runs(config, inputs)]:
        raise InvalidRequestError("the items do not fit their placeholders in the prompt", field="messages")


def _expected_runs(config: PreTrainedConfig, inputs: LanguageInputs) -> Iterator[tuple[int, int]]:
    modality, (time, height, width) = _grid(inputs)
    num_embeds = height * width // config.vision_config.spatial_merge_size**2
    if modality == _VIDEO and config.model_type.startswith("qwen3_"):
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
QWEN3_5 = _family(whole="Qwen3_5ForConditionalGeneration")
QWEN3_5_MOE = _family(whole="Qwen3_5MoeForConditionalGeneration")
