"""A small processor of any model type: its class with the default settings, and a tokenizer of bytes that has the
tokens that the class asks for."""

import inspect
import re
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

_PARTS = {
    "image_processor": IMAGE_PROCESSOR_MAPPING_NAMES,
    "video_processor": VIDEO_PROCESSOR_MAPPING_NAMES,
    "feature_extractor": FEATURE_EXTRACTOR_MAPPING_NAMES,
}
_OTHERWISE = {"feature_extractor": "ParakeetFeatureExtractor"}
_TOKEN = re.compile(r"""["'](<[^<>\s"']{2,40}>|<\|[^\s"']{2,40}\|>|\[[A-Z_]{3,20}\]|\]<\][a-z ]{2,20}\[>\[)["']""")
_MISSING = re.compile(r"(?:has no attribute|missing required attribute) '?(\w+?)(_id)?'?(?:$|\. Add)")
_LIKE = {
    "cosmos3_omni": "qwen3_vl",
    "fast_vlm": "llava",
    "glm_ocr": "glm46v",
    "glmga": "glm46v",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
}
"""Types whose checkpoints name the processor of another type."""
_TOKENS = {"pp_chart2table": ["<img>", "</img>", "<imgpad>"]}
"""Tokens that only the published chat template names."""
_MAX_TRIALS = 30


class CannotBeMadeError(Exception):
    """The processor needs what only a published checkpoint has."""


def small_processor(model_type: str, settings: dict[str, Any], of_parts: dict[str, dict[str, Any]]) -> Any:
    """`settings`: of the processor; `of_parts`: of its image and video processor. Each token that the class misses is
    named in its error, added, and the class tried again."""
    model_type = _LIKE.get(model_type, model_type)
    name = PROCESSOR_MAPPING_NAMES.get(model_type)
    if name is None:
        raise CannotBeMadeError("transformers names no processor")
    processor_class = _class_named(name)
    wanted = inspect.signature(processor_class.__init__).parameters
    parts = {}
    for part, names in _PARTS.items():
        if part in wanted and (own := _of_a_type_like(model_type, names) or _OTHERWISE.get(part)) is not None:
            parts[part] = _class_named(own)(**of_parts.get(part, {}))
    plain = sorted(set(_TOKEN.findall(inspect.getsource(inspect.getmodule(processor_class) or processor_class))))
    plain += _TOKENS.get(model_type, [])
    # Gemma 4 asks for these in another error.
    with_sound = ("audio_token", "boa_token", "eoa_token") if "feature_extractor" in parts else ()
    named = {name: f"<|{name}|>" for name in with_sound}
    for _ in range(_MAX_TRIALS):
        try:
            return processor_class(tokenizer=byte_tokenizer(named, plain), **parts, **settings)
        except (AttributeError, ValueError) as error:
            missing = _MISSING.search(str(error).strip())
            if missing is None or missing[1] in named:
                raise CannotBeMadeError(str(error)) from error
            named[missing[1]] = f"<|{missing[1]}|>"
    raise CannotBeMadeError(f"its tokenizer lacks more than {_MAX_TRIALS} tokens")


def byte_tokenizer(named: dict[str, str], plain: list[str]) -> PreTrainedTokenizerFast:
    """One token a byte, and some more."""
    bytes_only = models.BPE(vocab={one: index for index, one in enumerate(sorted(ByteLevel.alphabet()))}, merges=[])
    tokenizer = Tokenizer(bytes_only)
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=dict(named),
    )
    more = list(dict.fromkeys([*plain, *named.values()]))
    made.add_special_tokens({"additional_special_tokens": more}, replace_extra_special_tokens=False)
    return made


def _class_named(name: Any) -> Any:
    if isinstance(name, dict):
        name = name.get("torchvision") or name.get("pil")
    return getattr(transformers, name)


def _of_a_type_like(model_type: str, names: Any) -> Any:
    """The entry of the type itself, or of one with the same processor that has one."""
    same = [one for one, name in PROCESSOR_MAPPING_NAMES.items() if name == PROCESSOR_MAPPING_NAMES[model_type]]
    return next((names[one] for one in (model_type, *same) if one in names), None)
