"""Families with a plain causal decoder of which transformers' own methods do not tell all. An item's embeddings replace
the embeddings of its placeholders."""

import torch
from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily, output_head


def _without_picture_tokens(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the logits, with the dtype's lowest number for picture tokens, which must not be generated."""
    logits = output_head(model, hidden)
    logits[:, model.model.vocabulary_mapping.image_tokens] = torch.finfo(logits.dtype).min
    return logits


# The language half keeps `query_tokens`, a few rows: transformers initialises this parameter unconditionally.
BLIP_2 = LanguageFamily(
    whole="Blip2ForConditionalGeneration",
    unused=("vision_model", "qformer", "language_projection"),
    decoder="language_model.model",
)
# The model's VQ model turns a picture into tokens of the vocabulary. The vision half looks up their embeddings, as
# transformers' `get_image_features` does, so that this half gets an item as embeddings.
CHAMELEON = LanguageFamily(
    whole="ChameleonForConditionalGeneration",
    unused=("model.vqmodel",),
    decoder="model",
    logits=_without_picture_tokens,
)
PHI4_MULTIMODAL = LanguageFamily(
    whole="Phi4MultimodalForCausalLM",
    unused=("model.embed_tokens_extend",),
    decoder="model",
)
# The head cannot be found: the class's forward asks for the tower even without a sound.
QWEN2_AUDIO = LanguageFamily(
    whole="Qwen2AudioForConditionalGeneration", unused=("model.audio_tower", "model.multi_modal_projector")
)
