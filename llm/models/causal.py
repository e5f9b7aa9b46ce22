"""Families with a plain causal decoder, in which an item's embeddings replace those of its placeholders. They differ
only in their classes and in the names of their parts."""

from raylens.llm.models.family import LanguageFamily

_IDEFICS = ("model.vision_model", "model.connector")
_DEEPSEEK = ("model.vision_model", "model.aligner")
_GENERATION = ("model.vqmodel", "model.generation_embeddings", "model.generation_aligner", "model.generation_head")
_Q_FORMER = ("vision_model", "qformer", "language_projection")

ARIA = LanguageFamily(whole="AriaForConditionalGeneration")
# BLIP-2's language half keeps the few rows of `query_tokens`, as that of LLaVA-NeXT and LLaVA-OneVision keeps the one
# row of `image_newline`: transformers initialises these parameters whether the model has them or not.
BLIP_2 = LanguageFamily(whole="Blip2ForConditionalGeneration", unused=_Q_FORMER, decoder="language_model.model")
DEEPSEEK_VL = LanguageFamily(whole="DeepseekVLForConditionalGeneration", unused=_DEEPSEEK)
FUYU = LanguageFamily(whole="FuyuForCausalLM", unused=("model.vision_embed_tokens",))
IDEFICS3 = LanguageFamily(whole="Idefics3ForConditionalGeneration", unused=_IDEFICS, decoder="model.text_model")
INTERNVL = LanguageFamily(whole="InternVLForConditionalGeneration")
# Neither half of Janus has the parts that generate pictures.
JANUS = LanguageFamily(whole="JanusForConditionalGeneration", unused=(*_DEEPSEEK, *_GENERATION))
LLAVA = LanguageFamily(whole="LlavaForConditionalGeneration")
LLAVA_NEXT = LanguageFamily(whole="LlavaNextForConditionalGeneration")
LLAVA_ONEVISION = LanguageFamily(whole="LlavaOnevisionForConditionalGeneration")
MISTRAL3 = LanguageFamily(whole="Mistral3ForConditionalGeneration")
SMOLVLM = LanguageFamily(whole="SmolVLMForConditionalGeneration", unused=_IDEFICS, decoder="model.text_model")
VIPLLAVA = LanguageFamily(whole="VipLlavaForConditionalGeneration")
