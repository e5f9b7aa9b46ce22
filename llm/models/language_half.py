"""Hugging Face model classes without their vision half."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel


def language_half(whole: type[PreTrainedModel], *vision_parts: str) -> type[PreTrainedModel]:
    """A subclass of `whole` without the modules and parameters at the paths `vision_parts`.

    What a checkpoint has of them is never read into memory: they are dropped while the model has no storage yet.
    """

    def init(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        whole.__init__(self, config)
        for part in vision_parts:
            owner, _, name = part.rpartition(".")
            delattr(self.get_submodule(owner), name)

    names = [part.rpartition(".")[2] for part in vision_parts]
    attributes: dict[str, Any] = {
        "__doc__": f"{whole.__name__} without {', '.join(names)}.",
        "__module__": whole.__module__,
        "__init__": init,
        # Older checkpoints have other names in front of these.
        "_keys_to_ignore_on_load_unexpected": [
            *(whole._keys_to_ignore_on_load_unexpected or ()),
            *(rf"(^|\.){name}(\.|$)" for name in names),
        ],
    }
    # transformers finds its renaming of checkpoint keys by a model class's name and module.
    return type(whole.__name__, (whole,), attributes)
