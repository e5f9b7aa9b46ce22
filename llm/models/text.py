"""Text models of transformers, without a vision half. A vision plug-in computes the embeddings of their pictures."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raylens.llm.models.family import LanguageFamily


def text_family(model_type: str) -> LanguageFamily | None:
    """Returns the family of a causal language model, or None if transformers has no such `model_type`."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return None if name is None else LanguageFamily(whole=name, unused=(), decoder="model")
