"""Hugging Face models without some of their parts, so that a stage loads its half of a checkpoint and no more."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.modeling.model_configs import load_model_config

_ONLY_SAFETENSORS = "no pickled weights are read: `raylens convert safetensors SRC DST` writes a copy as safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfModel:
    """A half of a Hugging Face model.

    `whole`: the name in transformers of the model's class, whose module is imported when the half is first used. For a
    model that transformers does not have: a class of our own.
    `unused`: paths of the modules and parameters that the half does without.
    `renamings`: for a class of our own: patterns in the names of a checkpoint's weights, and what replaces each.
    """

    whole: str | type[PreTrainedModel]
    unused: tuple[str, ...]
    renamings: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole_class(self) -> type[PreTrainedModel]:
        if not isinstance(self.whole, str):
            return self.whole
        found: type[PreTrainedModel] = getattr(transformers, self.whole)
        return found

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return without(self.whole_class, *self.unused)


def without(whole: type[PreTrainedModel], *parts: str) -> type[PreTrainedModel]:
    """Returns a subclass of `whole` without the modules and parameters at the paths `parts`.

    Their weights in a checkpoint are never read into memory: the parts are dropped while the model has no storage yet.
    """

    def init(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        whole.__init__(self, config)
        for part in parts:
            owner, _, name = part.rpartition(".")
            delattr(self.get_submodule(owner), name)
        # With those that the parts had tied among themselves.
        self.all_tied_weights_keys = _untied(self.all_tied_weights_keys, parts)

    names = [part.rpartition(".")[2] for part in parts]
    attributes: dict[str, Any] = {
        "__doc__": f"{whole.__name__} without {', '.join(names)}.",
        "__module__": whole.__module__,
        "__init__": init,
        # Weights that were the same as ones that are gone have nothing to be tied to.
        "_tied_weights_keys": _untied(whole._tied_weights_keys or {}, parts),
        # Older checkpoints have other names in front of these.
        "_keys_to_ignore_on_load_unexpected": [
            *(whole._keys_to_ignore_on_load_unexpected or ()),
            *(rf"(^|\.){name}(\.|$)" for name in names),
        ],
    }
    # transformers finds its renaming of checkpoint keys by a model class's name and module.
    return type(whole.__name__, (whole,), attributes)


def _untied(tied: Mapping[str, str], parts: Sequence[str]) -> dict[str, str]:
    """Returns the tied weights, by name, that are not in the `parts`."""
    return {key: source for key, source in tied.items() if not any(is_within(path, parts) for path in (key, source))}


def is_within(path: str, parts: Iterable[str]) -> bool:
    """Returns whether a module or parameter is one of the `parts`, or in one of them."""
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def load_half(
    model_class: type[PreTrainedModel], checkpoint: str, *, half: str, renamings: Mapping[str, str], **options: Any
) -> PreTrainedModel:
    """Returns the model in evaluation mode. `options` are those of `from_pretrained`, and `half` names the half in
    errors. `renamings`: see `HalfModel`. No code of the checkpoint is run, and no pickle is read.

    Raises ValueError for a checkpoint without safetensors, and for one that lacks a weight: transformers would leave
    that weight random and only warn.
    """
    config = options.pop("config", None) or load_model_config(checkpoint)
    named: str | None = getattr(config, "transformers_weights", None)
    if named is not None and ".safetensors" not in Path(named).suffixes:
        raise ValueError(f"{checkpoint}: its weights are in {named}, and {_ONLY_SAFETENSORS}")
    try:
        model, loading = model_class.from_pretrained(
            checkpoint,
            config=config,
            output_loading_info=True,
            key_mapping=dict(renamings) or None,
            use_safetensors=True,
            trust_remote_code=False,
            **options,
        )
    except OSError as error:
        if "safetensors" not in str(error):
            raise
        raise ValueError(f"{checkpoint}: it has no weights as safetensors, and {_ONLY_SAFETENSORS}") from error
    if loading["missing_keys"]:
        raise ValueError(f"{checkpoint} lacks weights of the {half} half: {sorted(loading['missing_keys'])[:5]}")
    loaded: PreTrainedModel = model.eval()
    return loaded
