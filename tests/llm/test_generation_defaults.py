"""A checkpoint's generation settings: the engine takes from its files what transformers' `generate` takes."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlavaForConditionalGeneration

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.generation_defaults import (
    UNSUPPORTED,
    load_generation_config,
    unsupported_settings,
)
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.families import SERVED_FAMILIES
from raylens.preprocess.schema import ProcessedPrompt
from tests.preprocess.small_processors import save_processor
from tests.small_models import Json, whole_class

PROMPT = [1, *range(20, 32)]
METADATA = {"_from_model_config", "transformers_version"}
SUPPORTED = frozenset(
    {
        *("eos_token_id", "stop_strings", "min_length", "min_new_tokens"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
        *("suppress_tokens", "bad_words_ids"),
    }
)
WITHOUT_EFFECT = frozenset(
    {
        # Each request has a limit of its own, `max_tokens`.
        *("max_length", "max_new_tokens"),
        # Only among beams, which are named as unsupported.
        *("early_stopping", "length_penalty"),
        # Caches, compilation and guessed tokens: the same tokens, sooner or later.
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "continuous_batching_config", "use_mtp", "speculation_type"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_early_exit", "assistant_lookbehind", "assistant_ensemble_weight", "target_lookbehind"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
        # The order of tokens stays. A row with numbers that are not finite ends its own request.
        *("renormalize_logits", "remove_invalid_values"),
        # Padding, the first token of an encoder-decoder, and what `generate` returns beside tokens.
        *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    }
)
# WeMM has no class in transformers.
GENERATING = sorted(SERVED_FAMILIES - {"wemm"})


def edit(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | settings))


def edit_text_config(file: Path, **settings: Any) -> None:
    config = json.loads(file.read_text())
    config.get("text_config", config).update(settings)
    file.write_text(json.dumps(config))


def test_every_setting_of_generate_is_known() -> None:
    """A setting that a new version of transformers brings has to be put into one of the three."""
    tables = [*SUPPORTED, *UNSUPPORTED, *WITHOUT_EFFECT]
    assert len(tables) == len(set(tables))
    assert set(tables) == vars(GenerationConfig()).keys() - METADATA


def test_the_defaults_of_generate_itself_are_not_warned_of(tmp_path: Path) -> None:
    edit(tmp_path / "config.json", **GenerationConfig._get_default_generation_params())
    assert unsupported_settings(load_generation_config(str(tmp_path), None)) == {}


OF_MODEL = {"eos_token_id": [4, 968], "repetition_penalty": 1.25, "do_sample": True, "top_k": 7, "temperature": 0.5}
OF_TEXT = {"eos_token_id": 5, "top_p": 0.25, "top_k": 9, "min_length": 3}
OF_FILE = {"temperature": 0.75, "do_sample": True, "eos_token_id": [6, 7]}


@pytest.mark.parametrize("model_type", GENERATING)
def test_settings_are_those_of_the_whole_model(tmp_path: Path, model_type: str) -> None:
    """The text model's; with the whole model's; with a file of their own, which replaces both."""
    folder = save_processor(model_type, "byte_level", tmp_path)
    with torch.device("meta"):
        model: Any = whole_class(model_type)(AutoConfig.from_pretrained(folder))
    edit_text_config(tmp_path / "config.json", **OF_TEXT)
    check_settings(model, folder)
    edit(tmp_path / "config.json", **OF_MODEL)
    check_settings(model, folder)
    edit(tmp_path / "generation_config.json", **OF_FILE)
    check_settings(model, folder)


def check_settings(model: Any, folder: str) -> None:
    """Compares them with those that `from_pretrained` gives to a model beside its weights."""
    places: Json = {
        "cache_dir": None,
        "force_download": False,
        "proxies": None,
        "local_files_only": True,
        "token": None,
    }
    places |= {"revision": None, "subfolder": "", "trust_remote_code": False}
    model.adjust_generation_fn(None, False, None, folder, **places)
    found = load_generation_config(folder, None)
    for name in {*SUPPORTED, *UNSUPPORTED}:
        assert vars(found)[name] == vars(model.generation_config)[name], name


def greedy(folder: str, max_tokens: int = 24, **settings: Any) -> list[int]:
    """What the engine answers to PROMPT."""
    engine = LLMEngine(EngineConfig(folder, max_num_seqs=2, max_model_len=64))
    engine.add_request("r", ProcessedPrompt(PROMPT, [], []), [], SamplingParams(max_tokens=max_tokens, **settings))
    answer: list[int] = []
    while engine.has_unfinished():
        answer += [token_id for output in engine.step() for token_id in output.token_ids]
    return answer


def generated(folder: str, max_tokens: int = 24) -> list[int]:
    """What transformers answers to PROMPT."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    output = model.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=max_tokens, tokenizer=tokenizer)
    return output[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def free(shapes: str) -> list[int]:
    """The first tokens of the answer to PROMPT that nothing ends."""
    return greedy(shapes, ignore_eos=True)


def copy(shapes: str, folder: Path) -> str:
    return str(shutil.copytree(shapes, folder / "copy"))


@pytest.mark.parametrize("place", ["config.json", "text_config", "partial"])
def test_end_tokens_of_the_models_own_configuration_end_answers(
    shapes: str, tmp_path: Path, free: list[int], place: str
) -> None:
    folder = copy(shapes, tmp_path)
    config = Path(folder, "config.json")
    ends = [2, free[5]]
    own = json.loads(config.read_text()) | {"eos_token_id": ends}
    if place == "text_config":
        own["text_config"]["eos_token_id"] = own.pop("eos_token_id")
    config.write_text(json.dumps(own))
    Path(folder, "generation_config.json").unlink()
    if place == "partial":  # of which `generate` would not stop at all
        edit(Path(folder, "generation_config.json"), do_sample=False)
    else:
        assert generated(folder) == free[: free.index(free[5]) + 1]
    assert greedy(folder) == free[: free.index(free[5]) + 1]


@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 9},
        {"min_length": len(PROMPT) + 11},
        {"min_length": 10**6, "min_new_tokens": 9},
        {"suppress_tokens": "first"},
        {"bad_words_ids": "words"},
        {"stop_strings": "text"},
        {"repetition_penalty": 1.5},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_answers_follow_the_models_settings_as_those_of_generate(
    shapes: str, tmp_path: Path, free: list[int], settings: Json
) -> None:
    folder = copy(shapes, tmp_path)
    texts = AutoTokenizer.from_pretrained(folder)
    of_answer = {"first": free[:1], "words": [[free[0]], [free[2]]], "text": texts.decode(free[1:3])}
    made = {name: of_answer.get(value, value) if isinstance(value, str) else value for name, value in settings.items()}
    # An end token among the first of the answer, so that a minimum has something to do.
    edit(Path(folder, "generation_config.json"), eos_token_id=[2, free[3]], **made)
    expected = generated(folder)
    assert greedy(folder) == expected
    edit(Path(folder, "generation_config.json"), **dict.fromkeys(made))
    assert expected != generated(folder)


def test_an_end_token_among_bad_words_still_comes(shapes: str, tmp_path: Path, free: list[int]) -> None:
    folder = copy(shapes, tmp_path)
    edit(Path(folder, "generation_config.json"), eos_token_id=[2, free[3]], bad_words_ids=[[free[3]], [2]])
    assert greedy(folder) == generated(folder) == free[:4]


def test_a_request_goes_before_the_models_minimum(shapes: str, tmp_path: Path, free: list[int]) -> None:
    folder = copy(shapes, tmp_path)
    edit(Path(folder, "generation_config.json"), eos_token_id=free[3], min_new_tokens=9)
    assert greedy(folder, min_tokens=0) == free[: free.index(free[3]) + 1]
    assert len(greedy(folder, max_tokens=5)) == 5  # fewer than the model's minimum


def test_settings_that_are_not_supported_are_named_once(
    shapes: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy(shapes, tmp_path)
    settings = {"num_beams": 4, "typical_p": 0.5, "begin_suppress_tokens": [5], "bad_words_ids": [[1, 2]]}
    edit(Path(folder, "generation_config.json"), **settings)
    with caplog.at_level(logging.WARNING, logger="raylens.llm.generation_defaults"):
        LLMEngine(EngineConfig(folder, max_num_seqs=2, max_model_len=64))
    (told,) = [record.getMessage() for record in caplog.records if record.name == "raylens.llm.generation_defaults"]
    assert all(f"{name!r}: {value!r}" in told for name, value in settings.items())
