"""Finds the parts of a vision-language model by transformers' own methods."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


@dataclass(frozen=True, slots=True)
class FoundModel:
    """Paths of the parts in the model; "" is the model itself.

    `whole`: the model's class. `on_meta`: such a model without weights. `decoder`: takes embeddings and positions, and
    has neither vision half nor output head. `head`: the output embeddings; None: there are none. `positions`: the
    module with `get_rope_index`; None: positions are those of text."""

    whole: type[PreTrainedModel]
    on_meta: PreTrainedModel
    decoder: str
    head: str | None
    positions: str | None

    @property
    def unused_by_language(self) -> tuple[str, ...]:
        """Returns the paths of all modules beside the decoder and the head."""
        return tuple(self._beside_the_decoder())

    def _beside_the_decoder(self) -> Iterator[str]:
        names = self.decoder.split(".")
        for depth, name in enumerate(names):
            owner = ".".join(names[:depth])
            for other, _ in self.on_meta.get_submodule(owner).named_children():
                path = f"{owner}.{other}".removeprefix(".")
                if other != name and path != self.head:
                    yield path


def find_model(config: PreTrainedConfig) -> FoundModel:
    """Raises ValueError if transformers has no such model."""
    model_type = config.model_type
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    if name is None:
        raise ValueError(f"model_type {model_type!r} is no model of transformers with pictures and text")
    whole: type[PreTrainedModel] = getattr(transformers, name)
    with torch.device("meta"):
        model = whole._from_config(copy.deepcopy(config))  # some models write into their settings
    head = model.get_output_embeddings()
    paths = {module: path for path, module in model.named_modules()}
    return FoundModel(
        whole,
        model,
        decoder=paths[_find_decoder(model)],
        head=None if head is None else paths[head],
        positions=_owner_of("get_rope_index", model),
    )


def arguments_of(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "args", "kwargs")]


def _owner_of(method: str, model: PreTrainedModel) -> str | None:
    return next(
        (path for path in ("model", "") if hasattr(getattr(model, path, None) if path else model, method)), None
    )


def _find_decoder(model: PreTrainedModel) -> nn.Module:
    """Returns the innermost decoder: `get_decoder` may return a text model that has an output head of its own."""
    decoder: Any = model.get_decoder()
    while decoder.get_output_embeddings() is not None and decoder.get_decoder() is not decoder:
        decoder = decoder.get_decoder()
    found: nn.Module = decoder
    return found
