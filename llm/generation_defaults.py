"""Reads a checkpoint's generation settings: end tokens, sampling defaults, and unsupported settings."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from raylens.llm.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("constraints", "force_words_ids", "forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "max_time", "dola_layers"), ()),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "top_h", "typical_p"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), (1,)),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}),
    "token_healing": (False,),
}
"""Settings that change the answers of `generate`, each with its neutral values besides None."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling defaults and end tokens of a checkpoint.

    `sampling`: values for sampling parameters that a request leaves unset. `stop`: the stop strings.
    `min_tokens`: the least number of tokens of an answer; `min_length`: of prompt and answer together.
    `suppressed_token_ids`: tokens that are never sampled."""

    sampling: Mapping[str, Any]
    eos_token_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    min_tokens: int | None = None
    min_length: int = 0
    suppressed_token_ids: tuple[int, ...] = ()

    def fill(self, params: SamplingParams, num_prompt_tokens: int, room: int) -> SamplingParams:
        """Returns the parameters with the model's defaults where the request sets none. `room`: the tokens of context
        left after the prompt, which limit the model's minimum, as `max_tokens` does."""
        unset = {name: value for name, value in self.sampling.items() if getattr(params, name) is None}
        if params.min_tokens is None:
            wanted = self.min_length - num_prompt_tokens if self.min_tokens is None else self.min_tokens
            most = room if params.max_tokens is None else params.max_tokens
            unset["min_tokens"] = max(0, min(wanted, most))
        return replace(params, **unset)

    def stop_strings(self, params: SamplingParams) -> tuple[str, ...]:
        """Returns the stop strings of request and model."""
        return params.stop if params.ignore_eos else (*params.stop, *self.stop)


def load_generation_defaults(model: str, revision: str | None, tokenizer_eos: int | None) -> GenerationDefaults:
    """Reads the settings of a checkpoint, a folder or a hub id, and logs unsupported ones. `tokenizer_eos`: the
    tokenizer's end token, used if no file names any."""
    generation = load_generation_config(model, revision)
    if ignored := unsupported_settings(generation):
        logger.warning("the model's generation settings ask for %s, which is not supported and ignored", ignored)
    words = _words(generation)
    eos = tokenizer_eos if generation.eos_token_id is None else generation.eos_token_id
    return GenerationDefaults(
        sampling=_sampling(generation),
        eos_token_ids=frozenset(() if eos is None else _listed(eos)),
        stop=tuple(_listed(generation.stop_strings or ())),
        min_tokens=generation.min_new_tokens,
        min_length=generation.min_length or 0,
        suppressed_token_ids=tuple(word[0] for word in words if len(word) == 1),
    )


def load_generation_config(model: str, revision: str | None) -> GenerationConfig:
    """Returns the settings of `generate`: from generation_config.json, or from config.json if that file is missing.
    Unlike `generate`, takes the end tokens of config.json if generation_config.json names none."""
    of_model = GenerationConfig.from_model_config(PreTrainedConfig.get_config_dict(model, revision=revision)[0])
    try:
        generation = GenerationConfig.from_pretrained(model, revision=revision)
    except OSError:
        return of_model
    if generation.eos_token_id is None:
        generation.eos_token_id = of_model.eos_token_id
    return generation


def unsupported_settings(generation: GenerationConfig) -> dict[str, Any]:
    """Returns the settings, by name, that `generate` obeys and the engine ignores."""
    found = {name: getattr(generation, name) for name in UNSUPPORTED}
    changed = {name: value for name, value in found.items() if value is not None and value not in UNSUPPORTED[name]}
    if any(len(word) > 1 for word in _words(generation)):
        changed["bad_words_ids"] = generation.bad_words_ids
    return changed


def _sampling(generation: GenerationConfig) -> dict[str, Any]:
    """Returns the config's sampling values, or greedy decoding with its repetition penalty if it does not sample."""
    unset = {"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}  # transformers'
    found = {name: default if (own := getattr(generation, name)) is None else own for name, default in unset.items()}
    return found if generation.do_sample else found | {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def _words(generation: GenerationConfig) -> list[list[int]]:
    """Returns the forbidden token sequences. End tokens among `bad_words_ids` are dropped, as `generate` does."""
    eos = _listed(generation.eos_token_id or ())
    bad = [word for word in generation.bad_words_ids or () if word not in [[token_id] for token_id in eos]]
    return [*bad, *([token_id] for token_id in generation.suppress_tokens or ())]


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple) else [value]
