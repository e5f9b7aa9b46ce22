"""Reads the configuration of a checkpoint, also of the models that transformers does not know."""

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, TokenizersBackend

from raylens.modeling.torchvision_build import make_importable


def load_model_config(model: str, revision: str | None = None) -> PreTrainedConfig:
    """Returns the configuration of a checkpoint, a folder or a hub id. No code of the checkpoint is run.

    Raises what `AutoConfig.from_pretrained` raises."""
    register_model_configs()
    config: PreTrainedConfig = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    return config


def register_model_configs() -> None:
    """Makes transformers' `AutoConfig` and `AutoTokenizer` know the configurations that Raylens brings."""
    make_importable()
    from raylens.modeling.wemm_config import InternLM2Config, WemmConfig

    for config_class in (InternLM2Config, WemmConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        # Without this, AutoTokenizer would ask whether it may run the code of the checkpoint's own tokenizer.
        AutoTokenizer.register(config_class, fast_tokenizer_class=TokenizersBackend, exist_ok=True)
