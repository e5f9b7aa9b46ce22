"""Families whose items stand in for their placeholders in a plain causal decoder: they differ by their classes only."""

from llm.models.family import LanguageFamily

_IDEFICS = ("model.vision_model", "model.connector")
_DEEPSEEK = ("model.vision_model", "model.aligner")
_GENERATION = ("model.vqmodel", "model.generation_embeddings", "model.generation_aligner", "model.generation_head")
_Q_FORMER = ("vision_model", "qformer", "language_projection")

ARIA = LanguageFamily(whole="AriaForConditionalGeneration")
# It keeps `query_tokens`, a few rows, as LLaVA-NeXT and OneVision keep `image_newline`, a single one: transformers
# initialises them whether they are there or not.
BLIP_2 = LanguageFamily(whole="Blip2ForConditionalGeneration", unused=_Q_FORMER, decoder="language_model.model")
DEEPSEEK_VL = LanguageFamily(whole="DeepseekVLForConditionalGeneration", unused=_DEEPSEEK)
FUYU = LanguageFamily(whole="FuyuForCausalLM", unused=("model.vision_embed_tokens",))
IDEFICS3 = LanguageFamily(whole="Idefics3ForConditionalGeneration", unused=_IDEFICS, decoder="model.text_model")
INTERNVL = LanguageFamily(whole="InternVLForConditionalGeneration")
# Its parts that make pictures are not of the vision half either; nobody needs them.
JANUS = LanguageFamily(whole="JanusForConditionalGeneration", unused=(*_DEEPSEEK, *_GENERATION))
LLAVA = LanguageFamily(whole="LlavaForConditionalGeneration")
LLAVA_NEXT = LanguageFamily(whole="LlavaNextForConditionalGeneration")
LLAVA_ONEVISION = LanguageFamily(whole="LlavaOnevisionForConditionalGeneration")
MISTRAL3 = LanguageFamily(whole="Mistral3ForConditionalGeneration")
SMOLVLM = LanguageFamily(whole="SmolVLMForConditionalGeneration", unused=_IDEFICS, decoder="model.text_model")
VIPLLAVA = LanguageFamily(whole="VipLlavaForConditionalGeneration")
