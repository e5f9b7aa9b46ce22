"""Finds the parts of a model with pictures or sounds by transformers' own methods."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from raylens.modeling.half_model import is_within


@dataclass(frozen=True, slots=True)
class FoundModel:
    """Paths of the parts in the model; "" is the model itself.

    `whole`: the model's class. `on_meta`: such a model without weights. `decoder`: takes embeddings and positions, and
    has neither vision half nor output head. `head`: the output embeddings; None: there are none. `features`: the
    module with `get_image_features`; None: there is none. `sounds`: the module with `get_audio_features`; None: the
    model does not hear. `positions`: the module with `get_rope_index`; None: positions are those of text."""

    whole: type[PreTrainedModel]
    on_meta: PreTrainedModel
    decoder: str
    head: str | None
    features: str | None
    sounds: str | None
    positions: str | None

    @property
    def features_path(self) -> str:
        """Returns `features`. Raises ValueError if there are none."""
        if self.features is None:
            model_type = self.on_meta.config.model_type
            raise ValueError(f"a {model_type!r} computes no features of pictures apart from its text")
        return self.features

    @property
    def only_hears(self) -> bool:
        return self.features is None and self.sounds is not None

    @property
    def picture_fields(self) -> list[str]:
        """Returns the names of the processor's outputs that `get_image_features` may take."""
        return arguments_of(self.on_meta.get_submodule(self.features_path).get_image_features)

    @property
    def sound_fields(self) -> list[str]:
        """Returns the names of the processor's outputs that `get_audio_features` may take; none if it does not hear."""
        owner = None if self.sounds is None else self.on_meta.get_submodule(self.sounds)
        return [] if owner is None else arguments_of(owner.get_audio_features)

    @property
    def num_deepstack_levels(self) -> int:
        """Returns the number of further embeddings of a picture's position, for the decoder's first layers."""
        config: Any = self.on_meta.config
        has_levels = "deepstack_visual_embeds" in arguments_of(self.on_meta.get_submodule(self.decoder).forward)
        return len(config.vision_config.deepstack_visual_indexes) if has_levels else 0

    @property
    def position_fields(self) -> list[str]:
        """Returns the names of the processor's outputs that `get_rope_index` may take."""
        if self.positions is None:
            return []
        taken = arguments_of(self.on_meta.get_submodule(self.positions).get_rope_index)
        return [name for name in taken if name not in ("input_ids", "attention_mask", *TOKEN_TYPES)]

    @property
    def unused_by_vision(self) -> tuple[str, ...]:
        """Returns the paths of the decoder and the head."""
        is_apart = self.head is not None and not is_within(self.head, [self.decoder])
        return (self.decoder, self.head) if is_apart and self.head is not None else (self.decoder,)

    @property
    def unused_by_language(self) -> tuple[str, ...]:
        """Returns the paths of all modules with weights beside the decoder and the head."""
        return tuple(self._beside_the_decoder())

    def _beside_the_decoder(self) -> Iterator[str]:
        names = self.decoder.split(".")
        for depth, name in enumerate(names):
            owner = ".".join(names[:depth])
            for other, module in self.on_meta.get_submodule(owner).named_children():
                path = f"{owner}.{other}".removeprefix(".")
                if other != name and path != self.head and module.state_dict():
                    yield path


TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which a class takes the modality of each token."""
_PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "image_patch_id",
    "im_token_id",
    "img_context_token_id",
    "media_placeholder_token_id",
)
"""Names under which a configuration has the token at positions with a picture's embedding."""

_SOUNDS_NEED_THE_DECODER = frozenset({"muse_spark"})
"""Types whose `get_audio_features` uses weights of the decoder, which Encode does not have."""


def placeholder_id(config: Any) -> int:
    """Returns the token at positions with a picture's embedding. Raises ValueError if the configuration names none."""
    for name in _PLACEHOLDERS:
        if isinstance(found := getattr(config, name, None), int):
            return found
    if isinstance(found := (getattr(config, "vocabulary_map", None) or {}).get("<image>"), int):
        return found
    raise ValueError(f"the configuration of a {config.model_type!r} names no token for pictures")


def find_model(config: PreTrainedConfig) -> FoundModel:
    """Raises ValueError if transformers has no such model."""
    model_type = config.model_type
    name = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(model_type)
    if name is None:
        raise ValueError(f"model_type {model_type!r} is no model of transformers with pictures or sounds and text")
    whole: type[PreTrainedModel] = getattr(transformers, name)
    with torch.device("meta"):
        model = whole._from_config(copy.deepcopy(config))  # some models write into their settings
    decoder, head = _find_decoder(model)
    paths = {module: path for path, module in model.named_modules()}
    return FoundModel(
        whole,
        model,
        decoder=paths[decoder],
        head=None if head is None else paths[head],
        features=_owner_of("get_image_features", model),
        sounds=_owner_of("get_audio_features", model) if _hears(config) else None,
        positions=_owner_of("get_rope_index", model),
    )


def _hears(config: Any) -> bool:
    has_tower = getattr(config, "audio_config", None) is not None and getattr(config, "audio_token_id", None)
    return bool(has_tower) and config.model_type not in _SOUNDS_NEED_THE_DECODER


def arguments_of(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "args", "kwargs")]


def _owner_of(method: str, model: PreTrainedModel) -> str | None:
    return next(
        (path for path in ("model", "") if hasattr(getattr(model, path, None) if path else model, method)), None
    )


def _find_decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.Module | None]:
    """Returns the innermost decoder and the output head: `get_decoder` may return a text model that has a head of its
    own."""
    decoder: Any = model.get_decoder()
    head = model.get_output_embeddings()
    while (own := decoder.get_output_embeddings()) is not None:
        head = head or own
        inner = decoder.get_decoder()
        inner = getattr(decoder, "model", decoder) if inner is decoder else inner
        if inner is decoder:
            break
        decoder = inner
    return decoder, head
