"""Reads the configuration of a checkpoint, including models that transformers lacks."""

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, TokenizersBackend

from raylens.modeling.torchvision_build import make_importable


def load_model_config(model: str, revision: str | None = None) -> PreTrainedConfig:
    """Returns the configuration of a checkpoint, a folder or a hub id. A model that also speaks (Qwen-Omni) has the
    configuration of its thinker, the part that hears, sees and writes. Runs no code of the checkpoint.

    Raises the errors of `AutoConfig.from_pretrained`."""
    register_model_configs()
    config: PreTrainedConfig = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    thinker: PreTrainedConfig | None = getattr(config, "thinker_config", None)
    return config if thinker is None else thinker


def register_model_configs() -> None:
    """Registers Raylens' own configurations with transformers' `AutoConfig` and `AutoTokenizer`."""
    make_importable()
    from raylens.modeling.wemm_config import InternLM2Config, WemmConfig

    for config_class in (InternLM2Config, WemmConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        # Otherwise AutoTokenizer would ask whether to run the code of the checkpoint's own tokenizer.
        AutoTokenizer.register(config_class, fast_tokenizer_class=TokenizersBackend, exist_ok=True)
