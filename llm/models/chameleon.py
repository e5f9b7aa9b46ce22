"""Chameleon: a picture becomes tokens of the vocabulary, which the model's VQ model chooses.

An item's embeddings are these tokens' rows of the embedding table. The vision half looks them up, as transformers'
`get_image_features` does. So this half gets an item as embeddings, as with any other family.
"""

import torch
from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily, output_head


def _logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the logits, in which the tokens of pictures get the dtype's lowest number: the model must not answer with
    them."""
    logits = output_head(model, hidden)
    logits[:, model.model.vocabulary_mapping.image_tokens] = torch.finfo(logits.dtype).min
    return logits


CHAMELEON = LanguageFamily(
    whole="ChameleonForConditionalGeneration", unused=("model.vqmodel",), decoder="model", logits=_logits
)
