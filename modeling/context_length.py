"""The context length of a text model, by its configuration."""

from typing import Any

from transformers import PreTrainedConfig


def default_context_length(text_config: PreTrainedConfig, max_model_len: int | None) -> int:
    """Returns `max_model_len`, or else the model's own length. Raises ValueError if neither is known."""
    own = _own_length(text_config)
    if max_model_len is None and own is None:
        model = f"the configuration of the text model ({text_config.model_type})"
        raise ValueError(f"{model} has no max_position_embeddings: set max_model_len")
    return max_model_len or own or 0


def check_context_length(text_config: PreTrainedConfig, max_model_len: int | None, *, allow_longer: bool) -> None:
    """Raises ValueError for a `max_model_len` above the model's own. `allow_longer`: accept positions beyond the
    model's training, which only rotary embeddings support."""
    own = _longest_context(text_config)
    if max_model_len is None or own is None or max_model_len <= own:
        return
    model = f"the text model ({text_config.model_type}) is made for {own} positions"
    problem = f"max_model_len is {max_model_len}, but {model}"
    if _has_chunks(text_config):
        raise ValueError(f"{problem}: within a chunk its attention is full, beyond it is not supported")
    if not getattr(text_config, "rope_parameters", None):
        raise ValueError(f"{problem}: its positions are not rotary, so it has none beyond")
    if text_config.rope_parameters.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(f"{problem}: its rotary embeddings beyond depend on the length of a sequence")
    if not allow_longer:
        raise ValueError(f"{problem}: positions beyond make its answers worse; allow_longer_context: true accepts that")


def _longest_context(text_config: PreTrainedConfig) -> int | None:
    """Returns the most positions that the model supports. A scaled rotary embedding may exceed
    `max_position_embeddings`, which in some checkpoints is the length before scaling."""
    own = _own_length(text_config)
    rope: Any = getattr(text_config, "rope_parameters", None) or {}
    factor = rope.get("factor") or 1.0
    if own is None or _has_chunks(text_config):
        return own
    if rope.get("rope_type") == "yarn":
        return max(own, int(factor * (rope.get("original_max_position_embeddings") or own)))
    return int(factor * own) if rope.get("rope_type") == "linear" else own


def _own_length(text_config: PreTrainedConfig) -> int | None:
    """Returns `max_position_embeddings`; with chunked attention no more than a chunk, within which it is full
    attention."""
    own: int | None = getattr(text_config, "max_position_embeddings", None)
    if own is None or not _has_chunks(text_config):
        return own
    return min(own, text_config.attention_chunk_size or own)


def _has_chunks(text_config: PreTrainedConfig) -> bool:
    return "chunked_attention" in (getattr(text_config, "layer_types", None) or ())
