"""Hugging Face models without some of their parts, so that a stage loads only its half of a checkpoint."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.modeling.checkpoint_files import HOW_TO_CONVERT
from raylens.modeling.load_progress import told_progress
from raylens.modeling.quantized_checkpoint import take_quantization
from raylens.modeling.stored_weights import stored_class

_ONLY_SAFETENSORS = f"no pickled weights are read: {HOW_TO_CONVERT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfModel:
    """A half of a Hugging Face model.

    `whole`: the name of the model's class in transformers, imported on first use, or a class of our own for a model
    that transformers lacks.
    `unused`: paths of the modules and parameters that the half omits.
    `renamings`: for a class of our own, patterns in a checkpoint's weight names, with their replacements."""

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

    Their weights in a checkpoint are never read, because the parts are dropped before the model has storage."""

    def init(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        whole.__init__(self, config)
        for part in parts:
            owner, _, name = part.rpartition(".")
            delattr(self.get_submodule(owner), name)
        # Also drops ties within the parts.
        self.all_tied_weights_keys = _untied(self.all_tied_weights_keys, parts)

    names = [part.rpartition(".")[2] for part in parts]
    attributes: dict[str, Any] = {
        "__doc__": f"{whole.__name__} without {', '.join(names)}.",
        "__module__": whole.__module__,
        "__init__": init,
        # Weights tied to dropped ones become independent.
        "_tied_weights_keys": _untied(whole._tied_weights_keys or {}, parts),
        # Older checkpoints have other prefixes.
        "_keys_to_ignore_on_load_unexpected": [
            *(whole._keys_to_ignore_on_load_unexpected or ()),
            *(rf"(^|\.){name}(\.|$)" for name in names),
        ],
    }
    # transformers looks up its renamings of checkpoint keys by name and module of the class.
    return type(whole.__name__, (whole,), attributes)


def _untied(tied: Mapping[str, str], parts: Sequence[str]) -> dict[str, str]:
    """Returns the tied weights, by name, outside of the `parts`."""
    return {key: source for key, source in tied.items() if not any(is_within(path, parts) for path in (key, source))}


def is_within(path: str, parts: Iterable[str]) -> bool:
    """Returns whether a module or parameter is one of the `parts` or inside one."""
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def check_names_no_pickle(config: PreTrainedConfig, checkpoint: str) -> None:
    """Raises ValueError if the configuration names a file of weights other than safetensors, which transformers would
    read in spite of `use_safetensors`."""
    named: str | None = getattr(config, "transformers_weights", None)
    if named is not None and ".safetensors" not in Path(named).suffixes:
        raise ValueError(f"{checkpoint}: its weights are in {named}, and {_ONLY_SAFETENSORS}")


def load_half(
    model_class: type[PreTrainedModel],
    checkpoint: str,
    *,
    config: PreTrainedConfig,
    half: str,
    renamings: Mapping[str, str],
    keeps_forms: bool = False,
    maps_files: bool = True,
    **options: Any,
) -> PreTrainedModel:
    """Returns the model in evaluation mode. `options`: of `from_pretrained`. `half`: its name in errors. `renamings`:
    see `HalfModel`. `keeps_forms` and `maps_files`: see `stored_class`. Runs no code of the
    checkpoint and reads no pickle.

    Raises ValueError for a checkpoint without safetensors or with an unsupported quantization, for a weight of another
    shape than config.json means, and for a missing weight, which transformers would leave random with a mere
    warning."""
    check_names_no_pickle(config, checkpoint)
    config = copy.deepcopy(config)
    quantization = take_quantization(config)
    reading_class = stored_class(model_class, quantization, keeps_forms=keeps_forms, maps_files=maps_files)
    try:
        with told_progress():
            model, loading = reading_class.from_pretrained(
                checkpoint,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with their shapes
                key_mapping=dict(renamings) or None,
                use_safetensors=True,
                trust_remote_code=False,
                **options,
            )
    except OSError as error:
        if "safetensors" not in str(error):
            raise
        raise ValueError(f"{checkpoint}: it has no weights as safetensors, and {_ONLY_SAFETENSORS}") from error
    if wrong := sorted(loading["mismatched_keys"]):
        name, stored, meant = wrong[0]
        raise ValueError(
            f"{checkpoint}: config.json does not fit {len(wrong)} weights of the {half} half: {name} has the shape "
            f"{tuple(stored)}, not {tuple(meant)}"
        )
    if loading["missing_keys"]:
        raise ValueError(f"{checkpoint} lacks weights of the {half} half: {sorted(loading['missing_keys'])[:5]}")
    loaded: PreTrainedModel = model.eval()
    return loaded
