"""PaliGemma and PaliGemma 2: all of a prompt sees itself; positions count from 1."""

import torch
from transformers import PaliGemmaForConditionalGeneration, PreTrainedModel

from llm.models.family import LanguageFamily, output_head
from llm.prompt_layout import BidirectionalSpan, PromptLayout
from modeling.half_model import without
from preprocess.schema import ProcessedPrompt


def _layout(model: PreTrainedModel, prompt: ProcessedPrompt) -> PromptLayout:
    whole = BidirectionalSpan.of(range(len(prompt.prompt_token_ids)))
    return PromptLayout(rope_offset=1, spans=(whole,), is_prefix_cacheable=False)


def _logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    logits = output_head(model, hidden)
    softcap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


PALIGEMMA = LanguageFamily(
    model_class=without(PaliGemmaForConditionalGeneration, "model.vision_tower", "model.multi_modal_projector"),
    layout=_layout,
    windows_cut_spans=False,
    logits=_logits,
)
