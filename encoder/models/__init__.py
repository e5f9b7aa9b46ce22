"""What differs between model families in the vision half, by `model_type`."""

from encoder.models.chameleon import CHAMELEON
from encoder.models.family import VisionFamily, VisionModality
from encoder.models.florence2 import FLORENCE2
from encoder.models.fuyu import FUYU
from encoder.models.gemma3n import GEMMA3N
from encoder.models.idefics3 import IDEFICS3, SMOLVLM
from encoder.models.llava_next import LLAVA_NEXT, LLAVA_ONEVISION
from encoder.models.minicpmv4_6 import MINICPMV4_6
from encoder.models.mistral3 import MISTRAL3
from encoder.models.molmo2 import MOLMO2
from encoder.models.qwen2_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from encoder.models.tiles import ARIA, BLIP_2, DEEPSEEK_VL, GEMMA3, INTERNVL, JANUS, LLAVA, PALIGEMMA

FAMILIES: dict[str, VisionFamily] = {
    "aria": ARIA,
    "blip-2": BLIP_2,
    "chameleon": CHAMELEON,
    "deepseek_vl": DEEPSEEK_VL,
    "florence2": FLORENCE2,
    "fuyu": FUYU,
    "gemma3": GEMMA3,
    "gemma3n": GEMMA3N,
    "idefics3": IDEFICS3,
    "internvl": INTERNVL,
    "janus": JANUS,
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_onevision": LLAVA_ONEVISION,
    "minicpmv4_6": MINICPMV4_6,
    "mistral3": MISTRAL3,
    "molmo2": MOLMO2,
    "paligemma": PALIGEMMA,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_vl": QWEN2_VL,
    "qwen3_vl": QWEN3_VL,
    "smolvlm": SMOLVLM,
}

__all__ = ["FAMILIES", "VisionFamily", "VisionModality"]
