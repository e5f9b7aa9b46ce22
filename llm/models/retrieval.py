"""Models of ColPali's kind: they return a vector for each token of a page or a query, and no text. transformers' class
has a projection behind the decoder, which the pooling names, and no head for tokens."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily
from raylens.llm.models.spans import PALIGEMMA


def _no_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Returns what stands for logits in steps of the start; the endpoint lets no request sample from it."""
    return hidden


COLPALI = replace(
    PALIGEMMA,
    whole="ColPaliForRetrieval",
    unused=("vlm.vision_tower", "vlm.multi_modal_projector"),
    decoder="vlm.language_model",
    logits=_no_logits,
)
# transformers' class gives the decoder no grids of patches: a page's positions are those of text.
COLQWEN2 = LanguageFamily(
    whole="ColQwen2ForRetrieval",
    unused=("vlm.visual",),
    decoder="vlm.language_model",
    num_rope_axes=3,
    logits=_no_logits,
)
