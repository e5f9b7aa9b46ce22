"""Chameleon: the model's VQ model turns a picture into tokens of the vocabulary.

The vision half looks up the embeddings of these tokens, as transformers' `get_image_features` does. This half thus gets
an item as embeddings, as with any other family.
"""

import torch
from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily, output_head


def _logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the logits, with the dtype's lowest number for picture tokens, which must not be generated."""
    logits = output_head(model, hidden)
    logits[:, model.model.vocabulary_mapping.image_tokens] = torch.finfo(logits.dtype).min
    return logits


CHAMELEON = LanguageFamily(
    whole="ChameleonForConditionalGeneration", unused=("model.vqmodel",), decoder="model", logits=_logits
)
