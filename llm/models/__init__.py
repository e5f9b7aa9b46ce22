"""What differs between model families in the language half, by `model_type`."""

from llm.models.causal import (
    ARIA,
    BLIP_2,
    DEEPSEEK_VL,
    FUYU,
    IDEFICS3,
    INTERNVL,
    JANUS,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    MISTRAL3,
    SMOLVLM,
)
from llm.models.chameleon import CHAMELEON
from llm.models.family import LanguageFamily
from llm.models.gemma3 import GEMMA3
from llm.models.gemma3n import GEMMA3N
from llm.models.molmo2 import MOLMO2
from llm.models.paligemma import PALIGEMMA
from llm.models.qwen2_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL

FAMILIES: dict[str, LanguageFamily] = {
    "aria": ARIA,
    "blip-2": BLIP_2,
    "chameleon": CHAMELEON,
    "deepseek_vl": DEEPSEEK_VL,
    "fuyu": FUYU,
    "gemma3": GEMMA3,
    "gemma3n": GEMMA3N,
    "idefics3": IDEFICS3,
    "internvl": INTERNVL,
    "janus": JANUS,
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_onevision": LLAVA_ONEVISION,
    "mistral3": MISTRAL3,
    "molmo2": MOLMO2,
    "paligemma": PALIGEMMA,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_vl": QWEN2_VL,
    "qwen3_vl": QWEN3_VL,
    "smolvlm": SMOLVLM,
}

__all__ = ["FAMILIES", "LanguageFamily"]
