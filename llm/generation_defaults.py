"""Reads a checkpoint's generation config: the end tokens and the defaults of sampling."""

import logging
from typing import Any

from transformers import GenerationConfig

logger = logging.getLogger(__name__)

# Settings of a generation config that change which tokens transformers' `generate` chooses and that the engine ignores.
_IGNORED_SETTINGS = (
    "no_repeat_ngram_size",
    "suppress_tokens",
    "bad_words_ids",
    "typical_p",
)


def load_generation_config(model: str, revision: str | None) -> GenerationConfig:
    try:
        generation = GenerationConfig.from_pretrained(model, revision=revision)
    except OSError:
        generation = GenerationConfig()
    _warn_of_ignored_settings(generation)
    return generation


def default_sampling(generation: GenerationConfig) -> dict[str, Any]:
    """Returns the values of the sampling parameters that a request leaves unset: those of a generation config that
    samples, or else greedy decoding. Both keep the config's repetition penalty."""
    repetition_penalty = 1.0 if generation.repetition_penalty is None else generation.repetition_penalty
    if not generation.do_sample:
        off = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return off | {"repetition_penalty": repetition_penalty}
    return {
        "repetition_penalty": repetition_penalty,
        "min_p": 0.0 if generation.min_p is None else generation.min_p,
        "temperature": 1.0 if generation.temperature is None else generation.temperature,
        "top_p": 1.0 if generation.top_p is None else generation.top_p,
        "top_k": 50 if generation.top_k is None else generation.top_k,  # transformers' default when it samples
    }


def eos_token_ids(generation: GenerationConfig, tokenizer_eos: int | None) -> frozenset[int]:
    """Returns the model's end tokens: those of its generation config, or else that of its tokenizer."""
    eos = tokenizer_eos if generation.eos_token_id is None else generation.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def _warn_of_ignored_settings(generation: GenerationConfig) -> None:
    neutral: tuple[object, ...] = (None, 0, 1, 1.0, [], ())
    ignored = {name: getattr(generation, name, None) for name in _IGNORED_SETTINGS}
    if changed := {name: value for name, value in ignored.items() if value not in neutral}:
        logger.warning("the model's generation config asks for %s, which is not supported and ignored", changed)
