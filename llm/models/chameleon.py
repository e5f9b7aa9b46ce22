"""Chameleon: pictures are tokens of the vocabulary, which its VQ model chooses.

An item's embeddings are the rows of the embedding table that belong to these tokens, as `get_image_features` returns
them: the vision half looks them up, so that to this half an item is embeddings as with any other family.
"""

import torch
from transformers import PreTrainedModel

from llm.models.family import LanguageFamily, output_head


def _logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """The model is not to answer with tokens of pictures."""
    logits = output_head(model, hidden)
    logits[:, model.model.vocabulary_mapping.image_tokens] = torch.finfo(logits.dtype).min
    return logits


CHAMELEON = LanguageFamily(
    whole="ChameleonForConditionalGeneration", unused=("model.vqmodel",), decoder="model", logits=_logits
)
