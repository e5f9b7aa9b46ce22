"""Generate runs language halves that no family declares: greedy tokens equal those of `generate`.

`tests/llm/test_language_families.py` has the families that are served. These here wait for their other halves. Items'
embeddings are random, because the vision half has no part in this: transformers takes them as
`mm_encoder_outputs`."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.models.found import find_language_family
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.found_model import arguments_of
from raylens.preprocess.schema import PlaceholderRange, ProcessedPrompt
from tests.model_coverage.small_configs import small_config

NUM_TOKENS = 12
SPECIAL = range(60)
"""Ids of placeholders and the like, which no answer may have: `generate` would take one for a picture."""
_SIDE = 4
"""Patches of a picture's side."""
_PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "image_patch_id",
    "im_token_id",
    "img_context_token_id",
    "media_placeholder_token_id",
)
DENSE = (
    *("aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_edge", "cosmos3_omni", "deepseek_vl_hybrid", "emu3"),
    *("exaone4_5", "fast_vlm", "glm46v", "glm4v", "glm_ocr", "glmga", "got_ocr2", "granite_docling", "hunyuan_vl"),
    *("hyperclovax_vision_v2", "idefics2", "lighton_ocr", "llava_next_video", "muse_glimmer", "ovis2", "paddleocr_vl"),
    *("perception_lm", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "video_llama_3", "video_llava"),
)
WITH_EXPERTS = (
    *("deepseek_ocr2", "ernie4_5_vl_moe", "glm4v_moe", "kimi_k25", "muse_spark", "qwen3_omni_moe_thinker"),
    "step3p7",
)
DECLARED = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
"""Families that declare what can be found as well, because they also check their items."""


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


def small_model(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(small_config(model_type), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, own in sorted(model.named_parameters()):
            if own.ndim >= 2:
                spread = own[0].numel() ** -0.5 if "embed" not in name or "proj" in name else 0.5
                own.copy_(torch.randn(own.shape, generator=generator) * spread)
            elif own.numel():
                own.add_(torch.randn(own.shape, generator=generator) * 0.1)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=None, pad_token_id=0, suppress_tokens=list(SPECIAL)
    )
    return model.eval()


def placeholder_of(config: Any) -> int:
    found = [getattr(config, name, None) for name in _PLACEHOLDERS]
    return next((one for one in found if isinstance(one, int)), None) or int(config.vocabulary_map["<image>"])


def request(model: PreTrainedModel, seed: int, levels: int) -> Request:
    """A picture between texts."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    names = arguments_of(model.forward)
    has_grid = "image_grid_thw" in names
    merge = getattr(config.vision_config, "spatial_merge_size", 2) if hasattr(config, "vision_config") else 2
    num_rows = NUM_ROWS.get(config.model_type, _SIDE**2 // merge**2 if has_grid else 6)
    hidden_size = config.get_text_config().hidden_size
    rows = torch.randn(num_rows, hidden_size * (1 + levels), generator=generator)
    own, *deepstack = torch.split(rows, hidden_size, dim=-1)
    placeholder = placeholder_of(config)
    text = torch.randint(200, 380, (40,), generator=generator).tolist()
    start = getattr(config, "vision_start_token_id", None) or getattr(config, "image_start_token_id", None) or text[0]
    ids = [*text[:9], start, *[placeholder] * num_rows, *text[9:]]
    types = torch.tensor([[int(one == placeholder) for one in ids]])
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    inputs |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in names}
    grid = torch.tensor([[1, _SIDE, _SIDE]])
    if has_grid:
        inputs["image_grid_thw"] = grid
    answer = generate(model, inputs, own, deepstack)
    prompt = ProcessedPrompt(
        ids,
        [PlaceholderRange(10, num_rows)],
        [f"picture {seed}"],
        [{"image_grid_thw": grid.numpy()} if has_grid else {}],
    )
    return Request(prompt, [rows], answer[0, len(ids) :].tolist())


def generate(
    model: PreTrainedModel, inputs: dict[str, Any], rows: torch.Tensor, deepstack: list[torch.Tensor]
) -> torch.Tensor:
    """Classes take the rows of pictures as one tensor or as one tensor a picture."""
    for own, levels in (((rows,), [(level,) for level in deepstack]), ((rows,), deepstack), (rows[None], deepstack)):
        features = Features(pooler_output=own, deepstack_features=levels)
        with suppress(AttributeError, TypeError):
            given = {**inputs, "mm_encoder_outputs": {"image": features}}
            tokens: torch.Tensor = model.generate(**given, max_new_tokens=NUM_TOKENS)
            return tokens
    raise AssertionError("no form of the features fits")


def save_tokenizer(folder: Path) -> None:
    """One token a byte, and some more."""
    bytes_only = models.BPE(vocab={one: index for index, one in enumerate(sorted(ByteLevel.alphabet()))}, merges=[])
    tokenizer = Tokenizer(bytes_only)
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{index}>" for index in range(130)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<0>").save_pretrained(folder)


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


@pytest.mark.parametrize("model_type", [*DENSE, *WITH_EXPERTS, *DECLARED])
def test_found_halves_answer_as_generate_does(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(model_type)
    family = find_language_family(model.config)
    with torch.inference_mode():
        requests = [request(model, seed, family.num_deepstack_levels(model.config)) for seed in range(3)]
    assert len({tuple(one.expected) for one in requests}) == len(requests), "answers must depend on the input"
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    monkeypatch.setattr("raylens.llm.loader.load_language_family", find_language_family)
    for budget in (2048, 11):
        config = EngineConfig(str(tmp_path), kv_cache_bytes=2**22, block_size=4, max_num_batched_tokens=budget)
        engine = LLMEngine(config)
        assert answers(engine, requests) == [one.expected for one in requests]
