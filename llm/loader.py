"""Loads the language half of a checkpoint and nothing else."""

from transformers import AutoConfig, PreTrainedModel

from llm.attention import ATTENTION_NAME, register_paged_attention
from llm.config import EngineConfig
from llm.models import FAMILIES, LanguageFamily
from llm.parallel import ProcessGroup
from llm.sharded_loading import sharded_class


def load_language_half(
    config: EngineConfig, group: ProcessGroup | None = None
) -> tuple[PreTrainedModel, LanguageFamily]:
    """Returns the language half on its device, in evaluation mode, with paged attention, and its family.

    With a `group`, only this rank's part of it.

    Raises ValueError for an unsupported family and for a checkpoint that lacks a weight: transformers would
    leave that weight random and only warn.
    """
    hf_config = AutoConfig.from_pretrained(config.model, revision=config.revision)
    if hf_config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type {hf_config.model_type!r} of {config.model} is not supported, only {sorted(FAMILIES)}"
        )
    register_paged_attention()
    family = FAMILIES[hf_config.model_type]
    model_class = family.model_class if group is None else sharded_class(family.model_class, family.decoder, group)
    half, loading = model_class.from_pretrained(
        config.model,
        config=hf_config,
        revision=config.revision,
        dtype=config.dtype,
        attn_implementation={"text_config": ATTENTION_NAME},
        output_loading_info=True,
    )
    if loading["missing_keys"]:
        raise ValueError(f"{config.model} lacks weights of the language half: {sorted(loading['missing_keys'])[:5]}")
    return half.to(config.device).eval(), family
