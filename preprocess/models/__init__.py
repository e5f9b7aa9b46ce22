"""What differs between model families in preprocessing, by `model_type`."""

# ruff: noqa: E402
from preprocess.torchvision_build import make_importable

# Before anything else: families take functions from modules of transformers that import torchvision.
make_importable()


from preprocess.models.aria import ARIA
from preprocess.models.blip_2 import BLIP_2
from preprocess.models.chameleon import CHAMELEON
from preprocess.models.deepseek_vl import DEEPSEEK_VL
from preprocess.models.family import Modality, ProcessorFamily
from preprocess.models.florence2 import FLORENCE2
from preprocess.models.fuyu import FUYU
from preprocess.models.gemma3 import GEMMA3
from preprocess.models.gemma3n import GEMMA3N
from preprocess.models.idefics3 import IDEFICS3, SMOLVLM
from preprocess.models.internvl import INTERNVL
from preprocess.models.janus import JANUS
from preprocess.models.llava import LLAVA
from preprocess.models.llava_next import LLAVA_NEXT, LLAVA_ONEVISION
from preprocess.models.minicpmv4_6 import MINICPMV4_6
from preprocess.models.mistral3 import MISTRAL3
from preprocess.models.molmo2 import MOLMO2
from preprocess.models.paligemma import PALIGEMMA
from preprocess.models.phi4_multimodal import PHI4_MULTIMODAL
from preprocess.models.qwen2_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL

FAMILIES: dict[str, ProcessorFamily] = {
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
    "phi4_multimodal": PHI4_MULTIMODAL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_vl": QWEN2_VL,
    "qwen3_vl": QWEN3_VL,
    "smolvlm": SMOLVLM,
}

__all__ = ["FAMILIES", "Modality", "ProcessorFamily"]
