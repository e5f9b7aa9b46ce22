"""Families with a plain causal decoder. An item's embeddings replace the embeddings of its placeholders. The families
differ only in their classes and in the names of their parts."""

import torch
from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily, output_head

_IDEFICS = ("model.vision_model", "model.connector")
_DEEPSEEK = ("model.vision_model", "model.aligner")
_GENERATION = ("model.vqmodel", "model.generation_embeddings", "model.generation_aligner", "model.generation_head")
_Q_FORMER = ("vision_model", "qformer", "language_projection")


def _without_picture_tokens(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Returns the logits, with the dtype's lowest number for picture tokens, which must not be generated."""
    logits = output_head(model, hidden)
    logits[:, model.model.vocabulary_mapping.image_tokens] = torch.finfo(logits.dtype).min
    return logits


ARIA = LanguageFamily(whole="AriaForConditionalGeneration")
# The language half of BLIP-2 keeps `query_tokens`, and the halves of LLaVA-NeXT and LLaVA-OneVision keep
# `image_newline`, a few rows each: transformers initialises these parameters unconditionally.
BLIP_2 = LanguageFamily(whole="Blip2ForConditionalGeneration", unused=_Q_FORMER, decoder="language_model.model")
# The model's VQ model turns a picture into tokens of the vocabulary. The vision half looks up their embeddings, as
# transformers' `get_image_features` does, so that this half gets an item as embeddings.
CHAMELEON = LanguageFamily(
    whole="ChameleonForConditionalGeneration",
    unused=("model.vqmodel",),
    decoder="model",
    logits=_without_picture_tokens,
)
DEEPSEEK_VL = LanguageFamily(whole="DeepseekVLForConditionalGeneration", unused=_DEEPSEEK)
FUYU = LanguageFamily(whole="FuyuForCausalLM", unused=("model.vision_embed_tokens",))
IDEFICS3 = LanguageFamily(whole="Idefics3ForConditionalGeneration", unused=_IDEFICS, decoder="model.text_model")
INTERNVL = LanguageFamily(whole="InternVLForConditionalGeneration")
# Both halves of Janus omit the parts that generate pictures.
JANUS = LanguageFamily(whole="JanusForConditionalGeneration", unused=(*_DEEPSEEK, *_GENERATION))
LLAVA = LanguageFamily(whole="LlavaForConditionalGeneration")
LLAVA_NEXT = LanguageFamily(whole="LlavaNextForConditionalGeneration")
LLAVA_ONEVISION = LanguageFamily(whole="LlavaOnevisionForConditionalGeneration")
MISTRAL3 = LanguageFamily(whole="Mistral3ForConditionalGeneration")
SMOLVLM = LanguageFamily(whole="SmolVLMForConditionalGeneration", unused=_IDEFICS, decoder="model.text_model")
VIPLLAVA = LanguageFamily(whole="VipLlavaForConditionalGeneration")
