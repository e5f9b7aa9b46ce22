"""Text models of transformers, without a vision half. Pictures come to them as embeddings that a plug-in makes."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raylens.llm.models.family import LanguageFamily


def text_family(model_type: str) -> LanguageFamily | None:
    """Returns the family of a causal language model, or None if transformers has none of this `model_type`."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return None if name is None else LanguageFamily(whole=name, unused=(), decoder="model")
