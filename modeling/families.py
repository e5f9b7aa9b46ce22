"""The known model families, with the place of each stage's declaration.

The table is plain data: a stage imports a family's module only when it loads a model of that family. See
docs/add-a-model.md."""

import ast
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

Stage = Literal["preprocess", "encoder", "llm"]
FOUND = "found:find_language_family"
"""Of a language half whose facts the model's own methods tell."""


@dataclass(frozen=True, slots=True)
class Family:
    """For each stage the place of its `ProcessorFamily`, `VisionFamily` or `LanguageFamily`, or of a function that
    returns it for a configuration, as "module:NAME", with a module of the stage's `models`. None: the stage does not
    support the family, so the family is not served. `why_unserved`: the reason."""

    preprocess: str | None = None
    encoder: str | None = None
    llm: str | None = None
    why_unserved: str | None = None

    @property
    def is_served(self) -> bool:
        return None not in (self.preprocess, self.encoder, self.llm)


_FOUND_FAMILY = Family("found:find_processor_family", "found:find_vision_family", FOUND)
UNSERVED = {
    "diffusion_gemma": "it writes a text as a whole by diffusion, and the engine writes one token after the other",
    "evolla": "it answers questions about proteins, not about pictures",
    "git": "its words are numbered without the picture before them, and the engine counts all positions",
    "instructblip": "its features of a picture depend on the prompt, and items are encoded and cached by picture",
    "instructblipvideo": "its features of a video depend on the prompt, and items are encoded and cached by video",
    "kosmos-2": "the tokens at its picture's positions stand for words, too, and only its processor marks these",
    "kosmos-2.5": "its embeddings depend on marks around a picture that its configuration does not name",
    "mistral4": "it is a text model without a vision half, and is served as a part of `mistral3`",
    "pi0": "it returns the actions of a robot and no text",
    "shieldgemma2": "it returns the probabilities that a picture violates policies and no text",
}
"""Types that transformers counts among models for pictures and text, with the reasons for refusing them."""

FAMILIES: dict[str, Family] = {name: Family(why_unserved=reason) for name, reason in UNSERVED.items()} | {
    "aria": Family("aria:ARIA", "tiles:ARIA", FOUND),
    "blip-2": Family("fixed_size:BLIP_2", "tiles:BLIP_2", "causal:BLIP_2"),
    "chameleon": Family("fixed_size:CHAMELEON", "chameleon:CHAMELEON", "causal:CHAMELEON"),
    "deepseek_vl": Family("fixed_size:DEEPSEEK_VL", "tiles:DEEPSEEK_VL", FOUND),
    "florence2": Family("fixed_size:FLORENCE2", "tiles:FLORENCE2", "encoder_decoder:FLORENCE2"),
    "fuyu": Family("fuyu:FUYU", "fuyu:FUYU", FOUND),
    "gemma3": Family("gemma3:GEMMA3", "tiles:GEMMA3", "spans:GEMMA3"),
    "gemma3n": Family("fixed_size:GEMMA3N", "gemma3n:GEMMA3N", "gemma3n:GEMMA3N"),
    "idefics3": Family("idefics3:IDEFICS3", "idefics3:IDEFICS3", FOUND),
    "internlm2": Family(
        llm="internlm2:INTERNLM2",
        why_unserved="it is the text half of InternLM-XComposer2, whose vision half is not here",
    ),
    "internvl": Family("internvl:INTERNVL", "tiles:INTERNVL", FOUND),
    "janus": Family("fixed_size:JANUS", "tiles:JANUS", FOUND),
    "llava": Family("fixed_size:LLAVA", "tiles:LLAVA", FOUND),
    "llava_next": Family("llava_next:LLAVA_NEXT", "llava_next:LLAVA_NEXT", FOUND),
    "llava_onevision": Family("llava_next:LLAVA_ONEVISION", "llava_next:LLAVA_ONEVISION", FOUND),
    "minicpm_ocr": Family("minicpmv4_6:MINICPM_OCR", "minicpmv4_6:MINICPM_OCR", FOUND),
    "minicpmv4_6": Family("minicpmv4_6:MINICPMV4_6", "minicpmv4_6:MINICPMV4_6", FOUND),
    "minicpmv4_7": Family("minicpmv4_6:MINICPMV4_7", "minicpmv4_6:MINICPMV4_7", FOUND),
    "mistral3": Family("mistral3:MISTRAL3", "mistral3:MISTRAL3", FOUND),
    "mllama": Family("mllama:MLLAMA", "mllama:MLLAMA", "mllama:MLLAMA"),
    "molmo2": Family("molmo2:MOLMO2", "molmo2:MOLMO2", "spans:MOLMO2"),
    "paligemma": Family("fixed_size:PALIGEMMA", "tiles:PALIGEMMA", "spans:PALIGEMMA"),
    "phi4_multimodal": Family(
        "phi4_multimodal:PHI4_MULTIMODAL", "phi4_multimodal:PHI4_MULTIMODAL", "causal:PHI4_MULTIMODAL"
    ),
    "qwen2_5_vl": Family("qwen2_vl:QWEN2_5_VL", "qwen2_vl:QWEN2_5_VL", "qwen2_vl:QWEN2_5_VL"),
    "qwen2_vl": Family("qwen2_vl:QWEN2_VL", "qwen2_vl:QWEN2_VL", "qwen2_vl:QWEN2_VL"),
    "qwen3_5": Family("qwen2_vl:QWEN3_VL", "qwen2_vl:QWEN3_5", "qwen2_vl:QWEN3_5"),
    "qwen3_5_moe": Family("qwen2_vl:QWEN3_VL", "qwen2_vl:QWEN3_5_MOE", "qwen2_vl:QWEN3_5_MOE"),
    "qwen3_vl": Family("qwen2_vl:QWEN3_VL", "qwen2_vl:QWEN3_VL", "qwen2_vl:QWEN3_VL"),
    "qwen3_vl_moe": Family("qwen2_vl:QWEN3_VL", "qwen2_vl:QWEN3_VL_MOE", "qwen2_vl:QWEN3_VL_MOE"),
    "smolvlm": Family("idefics3:SMOLVLM", "idefics3:SMOLVLM", FOUND),
    "vipllava": Family("fixed_size:LLAVA", "tiles:VIPLLAVA", FOUND),
    "wemm": Family("wemm:WEMM", "wemm:WEMM", "wemm:WEMM"),
}
"""The families by `model_type` in a checkpoint's config.json."""

RETRIEVAL = {
    "colpali": Family("retrieval:COLPALI", "tiles:COLPALI", "retrieval:COLPALI"),
    "colqwen2": Family("retrieval:COLQWEN2", "qwen2_vl:COLQWEN2", "retrieval:COLQWEN2"),
}
"""Families that embed pages and queries, and write no text. See `raylens.modeling.pooling`."""

PARTLY_FOUND = {
    "emu3": Family("emu3:emu3", "chameleon:EMU3", FOUND),
    "ernie4_5_vl_moe": Family(_FOUND_FAMILY.preprocess, _FOUND_FAMILY.encoder, "by_token:ernie4_5_vl_moe"),
    "gemma4": Family(_FOUND_FAMILY.preprocess, _FOUND_FAMILY.encoder, "by_token:gemma4"),
    "gemma4_unified": Family(_FOUND_FAMILY.preprocess, _FOUND_FAMILY.encoder, "spans:gemma4_unified"),
    "granite4_vision": Family(
        _FOUND_FAMILY.preprocess, "granite4_vision:granite4_vision", "granite4_vision:granite4_vision"
    ),
    "idefics2": Family("idefics2:idefics2", _FOUND_FAMILY.encoder, FOUND),
    "llama4": Family(_FOUND_FAMILY.preprocess, "llama4:LLAMA4", FOUND),
    "pp_chart2table": Family("pp_chart2table:pp_chart2table", _FOUND_FAMILY.encoder, FOUND),
    "qwen2_audio": Family("qwen2_audio:QWEN2_AUDIO", "qwen2_audio:QWEN2_AUDIO", "causal:QWEN2_AUDIO"),
    "qwen4_exp": Family(_FOUND_FAMILY.preprocess, _FOUND_FAMILY.encoder, "by_token:qwen4_exp"),
}
"""Families with a declaration of some stages. Their halves are compared with the model at the start, as found
ones are."""

SERVED_FAMILIES = frozenset(name for name, family in FAMILIES.items() if family.is_served)


def known_to(stage: Stage) -> list[str]:
    """Returns the `model_type`s of generating models that the stage supports, sorted."""
    return sorted(name for name, family in FAMILIES.items() if getattr(family, stage) is not None)


def is_found(model_type: str) -> bool:
    """Returns whether stages find the family, which transformers has."""
    return model_type not in FAMILIES and model_type in multimodal_types()


@cache
def multimodal_types() -> frozenset[str]:
    """Returns the `model_type`s of transformers' MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES. Runs the assignments of its
    module alone: importing the module imports torch, which takes seconds."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("models").joinpath("auto", "modeling_auto.py").read_text()
    tables: dict[str, Any] = {"OrderedDict": dict}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_MAPPING_NAMES"):
            exec(compile(ast.Module([node], []), "modeling_auto.py", "exec"), tables)
    return frozenset(tables["MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"])


def load_family(stage: Stage, model_type: str) -> Any:
    """Imports and returns the stage's declaration of a family, or the function that finds it. Raises ValueError for an
    unsupported family."""
    from raylens.modeling.torchvision_build import make_importable

    make_importable()
    row = (
        PARTLY_FOUND.get(model_type, _FOUND_FAMILY) if is_found(model_type) else (FAMILIES | RETRIEVAL).get(model_type)
    )
    place: str | None = None if row is None else getattr(row, stage)
    if place is None:
        raise ValueError(f"model_type {model_type!r} is not supported, only {known_to(stage)}")
    module, _, name = place.partition(":")
    return getattr(import_module(f"raylens.{stage}.models.{module}"), name)


def family_of(stage: Stage, config: Any) -> Any:
    """Returns the stage's declared or found family of a model's configuration. Raises ValueError for an unsupported
    family."""
    family = load_family(stage, config.model_type)
    return family(config) if callable(family) else family
