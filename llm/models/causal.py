"""Families whose items stand in for their placeholders in a plain causal decoder: they differ by their classes only."""

from transformers import (
    AriaForConditionalGeneration,
    Blip2ForConditionalGeneration,
    DeepseekVLForConditionalGeneration,
    FuyuForCausalLM,
    Idefics3ForConditionalGeneration,
    InternVLForConditionalGeneration,
    JanusForConditionalGeneration,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
    Mistral3ForConditionalGeneration,
    SmolVLMForConditionalGeneration,
)

from llm.models.family import LanguageFamily
from modeling.half_model import without

_TOWER = ("model.vision_tower", "model.multi_modal_projector")
_IDEFICS = ("model.vision_model", "model.connector")
_DEEPSEEK = ("model.vision_model", "model.aligner")
_GENERATION = ("model.vqmodel", "model.generation_embeddings", "model.generation_aligner", "model.generation_head")
_Q_FORMER = ("vision_model", "qformer", "language_projection")

ARIA = LanguageFamily(model_class=without(AriaForConditionalGeneration, *_TOWER))
# It keeps `query_tokens`, a few rows, as LLaVA-NeXT and OneVision keep `image_newline`, a single one: transformers
# initialises them whether they are there or not.
BLIP_2 = LanguageFamily(model_class=without(Blip2ForConditionalGeneration, *_Q_FORMER), decoder="language_model.model")
DEEPSEEK_VL = LanguageFamily(model_class=without(DeepseekVLForConditionalGeneration, *_DEEPSEEK))
FUYU = LanguageFamily(model_class=without(FuyuForCausalLM, "model.vision_embed_tokens"))
IDEFICS3 = LanguageFamily(model_class=without(Idefics3ForConditionalGeneration, *_IDEFICS), decoder="model.text_model")
INTERNVL = LanguageFamily(model_class=without(InternVLForConditionalGeneration, *_TOWER))
# Its parts that make pictures are not of the vision half either; nobody needs them.
JANUS = LanguageFamily(model_class=without(JanusForConditionalGeneration, *_DEEPSEEK, *_GENERATION))
LLAVA = LanguageFamily(model_class=without(LlavaForConditionalGeneration, *_TOWER))
LLAVA_NEXT = LanguageFamily(model_class=without(LlavaNextForConditionalGeneration, *_TOWER))
LLAVA_ONEVISION = LanguageFamily(model_class=without(LlavaOnevisionForConditionalGeneration, *_TOWER))
MISTRAL3 = LanguageFamily(model_class=without(Mistral3ForConditionalGeneration, *_TOWER))
SMOLVLM = LanguageFamily(model_class=without(SmolVLMForConditionalGeneration, *_IDEFICS), decoder="model.text_model")
