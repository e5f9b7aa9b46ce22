"""Language halves of small random models, and requests with what `generate` answers to them.

Items' embeddings are random, because the vision half has no part in this: transformers takes them as
`mm_encoder_outputs`."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.found_model import TOKEN_TYPES, arguments_of, placeholder_id
from raylens.preprocess.schema import PlaceholderRange, ProcessedPrompt
from tests.model_coverage.small_checkpoints import spread_weights
from tests.model_coverage.small_configs import small_config
from tests.model_coverage.small_processors import byte_tokenizer

NUM_TOKENS = 12
SPECIAL = range(60)
"""Ids of placeholders and the like, which no answer may have: `generate` would take one for a picture."""
_SIDE = 4
"""Patches of a picture's side."""
NUM_ROWS = {"hunyuan_vl": 8}
"""Of a picture, where a row end or an edge has an embedding, too."""


class Features(SimpleNamespace):
    """What a class asks for besides is None."""

    def __getattr__(self, name: str) -> None:
        return None


@dataclass(frozen=True)
class Request:
    prompt: ProcessedPrompt
    embeddings: list[torch.Tensor]
    expected: list[int]


def small_model(model_type: str, text_type: str | None = None) -> PreTrainedModel:
    """`text_type`: of its text model, if not that of its class."""
    torch.manual_seed(0)
    changes = {} if text_type is None else {"text_config": small_config(text_type).to_dict()}
    config = small_config(model_type, changes=changes)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    spread_weights(model)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0, suppress_tokens=list(SPECIAL)
    )
    return model.eval()


def request(
    model: PreTrainedModel, seed: int, levels: int, *, after: list[int] | None = None, num_tokens: int = NUM_TOKENS
) -> Request:
    """A picture between texts. `after`: the text behind the picture. Pictures of one seed are the same."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    names = arguments_of(model.forward)
    has_grid = "image_grid_thw" in names
    merge = getattr(config.vision_config, "spatial_merge_size", 2) if hasattr(config, "vision_config") else 2
    num_rows = NUM_ROWS.get(config.model_type, _SIDE**2 // merge**2 if has_grid else 6)
    hidden_size = config.get_text_config().hidden_size
    rows = torch.randn(num_rows, hidden_size * (1 + levels), generator=generator)
    own, *deepstack = torch.split(rows, hidden_size, dim=-1)
    placeholder = placeholder_id(config)
    text = torch.randint(200, 380, (40,), generator=generator).tolist()
    start = getattr(config, "vision_start_token_id", None) or getattr(config, "image_start_token_id", None) or text[0]
    ids = [*text[:9], start, *[placeholder] * num_rows, *(text[9:] if after is None else after)]
    types = torch.tensor([[int(one == placeholder) for one in ids]])
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    inputs |= {name: types for name in TOKEN_TYPES if name in names}
    grid = torch.tensor([[1, _SIDE, _SIDE]])
    if has_grid:
        inputs["image_grid_thw"] = grid
    answer = generate(model, inputs, own, deepstack, num_tokens)
    prompt = ProcessedPrompt(
        ids,
        [PlaceholderRange(10, num_rows)],
        [f"picture {seed}"],
        [{"image_grid_thw": grid.numpy()} if has_grid else {}],
    )
    return Request(prompt, [rows], answer[0, len(ids) :].tolist())


def generate(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    rows: torch.Tensor,
    deepstack: list[torch.Tensor],
    num_tokens: int,
) -> torch.Tensor:
    """Classes take the rows of pictures as one tensor or as one tensor a picture."""
    for own, levels in (((rows,), [(level,) for level in deepstack]), ((rows,), deepstack), (rows[None], deepstack)):
        features = Features(pooler_output=own, deepstack_features=levels)
        with suppress(AttributeError, TypeError):
            given = {**inputs, "mm_encoder_outputs": {"image": features}}
            tokens: torch.Tensor = model.generate(**given, max_new_tokens=num_tokens)
            return tokens
    raise AssertionError("no form of the features fits")


def save_tokenizer(folder: Path) -> None:
    byte_tokenizer({}, [f"<{index}>" for index in range(130)]).save_pretrained(folder)


def answers(engine: LLMEngine, requests: list[Request]) -> list[list[int]]:
    bias = dict.fromkeys(SPECIAL, -100.0)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logit_bias=bias)
    for index, one in enumerate(requests):
        engine.add_request(str(index), one.prompt, one.embeddings, params)
    found: list[list[int]] = [[] for _ in requests]
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            found[int(output.request_id)] += output.token_ids
    return found
