"""InternLM2's text models beside the reference: WeMM's by either of its names of weights, InternLM-XComposer2's, and
InternLM2 itself."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from raylens.encoder.config import EncoderConfig
from raylens.encoder.loader import load_vision_half
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.loader import load_language_half
from raylens.llm.models.internlm2 import InternLM2ForCausalLM
from raylens.llm.outputs import RequestOutput
from raylens.llm.ranks.sharding import shard
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.checkpoint_conversion import MODEL_RENAMINGS, convert_checkpoint
from raylens.modeling.wemm_config import InternLM2Config
from tests.llm.greedy_answers import answers
from tests.llm.ranks import silent_rank
from tests.small_models import Request, make_checkpoint, small_requests, whole_class

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 96, "plora_rank": 4}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_checkpoint("wemm", tmp_path_factory.mktemp("published")))


@pytest.fixture(scope="module")
def reference(published: Path) -> PreTrainedModel:
    model: PreTrainedModel = whole_class("wemm").from_pretrained(published, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def requests(reference: PreTrainedModel) -> list[Request]:
    return small_requests("wemm", reference)


def test_a_converted_folder_has_the_same_weights(published: Path, tmp_path: Path) -> None:
    convert_checkpoint(published, tmp_path / "converted", MODEL_RENAMINGS["wemm"], say=lambda text: None)
    names = load_file(tmp_path / "converted" / "model.safetensors").keys()
    assert not any("original_linear" in name for name in names)
    folders = str(published), str(tmp_path / "converted")
    for first, second in (
        [load_language_half(EngineConfig(folder))[0].state_dict() for folder in folders],
        [load_vision_half(EncoderConfig(folder))[0].state_dict() for folder in folders],
    ):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def text_folder(published: Path, folder: Path, *, has_plora: bool) -> str:
    """InternLM-XComposer2's names for the weights of the same text model, or InternLM2's, and a vision half's."""
    shutil.copytree(published, folder)
    weights = load_file(folder / "model.safetensors")
    text = {
        name.removeprefix("language_model.").replace(".original_linear.", "."): weight
        for name, weight in weights.items()
        if name.startswith("language_model.") and (has_plora or "Plora" not in name)
    }
    save_file({**text, "vit.vision_tower.weight": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())["text_config"]
    config |= {"model_type": "internlm2"} | ({} if has_plora else {"plora_rank": 0})
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.long
def test_xcomposers_text_half_answers_like_the_reference(
    published: Path, requests: list[Request], tmp_path: Path
) -> None:
    engine = LLMEngine(EngineConfig(text_folder(published, tmp_path / "text", has_plora=True)))
    assert answers(engine, requests) == [one.expected for one in requests]


@pytest.mark.long
def test_internlm2_itself_answers_like_the_reference_without_its_lora(
    published: Path, requests: list[Request], tmp_path: Path
) -> None:
    engine = LLMEngine(EngineConfig(text_folder(published, tmp_path / "text", has_plora=False)))
    are_equal = [answers(engine, [one]) == [one.expected] for one in requests]
    assert are_equal == [not one.embeddings for one in requests]
    assert len(set(are_equal)) == 2


def test_placeholders_behind_the_vocabulary_have_no_probability(
    published: Path, reference: PreTrainedModel, requests: list[Request]
) -> None:
    """The published tokenizer has none, so theirs is a new id."""
    engine = LLMEngine(EngineConfig(str(published)))
    asked = next(one for one in requests if one.embeddings)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    engine.add_request("0", asked.prompt, asked.embeddings, params)
    (first,) = [output for output in iter_steps(engine) if output.prompt_logprobs]
    vocab_size = reference.config.text_config.vocab_size
    told = dict(enumerate(first.prompt_logprobs, start=1))
    assert len(told) == len(asked.prompt.prompt_token_ids) - 1
    for position, one in told.items():
        assert one.token_id == asked.prompt.prompt_token_ids[position]
        assert (one.logprob == -math.inf) == (one.token_id >= vocab_size) == (one.rank > vocab_size)
        assert all(token < vocab_size for token, _ in one.top)
    assert any(one.logprob == -math.inf for one in told.values())


def iter_steps(engine: LLMEngine) -> Iterator[RequestOutput]:
    while engine.has_unfinished():
        yield from engine.step()


def test_heads_stay_with_their_keys_and_values() -> None:
    """Two key-value heads are for one or two ranks; four ranks would each get a part of a head."""
    config = InternLM2Config(**SMALL, num_attention_heads=8, num_key_value_heads=2)
    for num_ranks in (1, 2):
        model = InternLM2ForCausalLM(config)
        shard(model, model.model, silent_rank(0, num_ranks))
        layer: Any = model.model.layers[0].get_submodule("attention")
        assert len(layer.wqkv.weight) == len(layer.wqkv_plora_b.weight) == 48 // num_ranks
        assert layer.wqkv_plora_a.weight.shape == (4, 32)
        assert layer.wo_plora_a.weight.shape == (4, 32 // num_ranks)
        assert layer.wo_plora_b.weight.shape == (32, 4)
    model = InternLM2ForCausalLM(config)
    with pytest.raises(ValueError, match="2 attention heads cannot be divided by 4 ranks"):
        shard(model, model.model, silent_rank(0, 4))
