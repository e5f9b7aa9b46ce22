"""The interface of a vision plug-in. A plug-in is plain Python and imports nothing of Raylens."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    # Not at run time: the command line looks for plug-ins and never touches a tensor.
    import torch
    from PIL import Image


PluginParams = Mapping[str, Any]
"""Where and how precisely a plug-in computes: `vision_device` and `projector_device` by torch's names, `vision_bits`
and `projector_bits` of 32, 16 or 8. Beside them stand the options of the server's settings, which the plug-in knows."""


class VisionPlugin(Protocol):
    """Turns pictures into embeddings for one kind of text model.

    A plug-in may have a method `load`, without arguments. Only the process that embeds pictures calls it, once, before
    `embed_images`: weights belong there. A plug-in that loads its weights when it is made works, too, but each replica
    of Preprocess then holds them."""

    def name(self) -> str:
        """Returns the name by which users choose the pipeline."""

    def image_start(self) -> str:
        """Returns the text in front of each picture's positions, or an empty one."""

    def image_end(self) -> str:
        """Returns the text behind each picture's positions, or an empty one."""

    def placeholder_token_id(self) -> int:
        """Returns the token id that stands at a picture's positions in the token ids of a prompt."""

    def num_image_embeds(self) -> int:
        """Returns how many positions a picture takes, whatever its size."""

    def embed_images(self, images: "list[Image.Image]") -> "torch.Tensor":
        """Returns the embeddings of RGB pictures, (len(images), num_image_embeds, hidden size of the text model)."""


class VisionPluginError(RuntimeError):
    """A plug-in that breaks the interface, or that fails. The message names the pipeline. If embedding fails, clients
    see the message, so it holds nothing that the plug-in says."""


_METHODS = ("name", "image_start", "image_end", "placeholder_token_id", "num_image_embeds", "embed_images")


def check_plugin(plugin: Any, source: str) -> VisionPlugin:
    """Returns `plugin`, which the module `source` has made. Raises VisionPluginError if it lacks a method, or if a
    method returns something else than the interface says."""
    if missing := [method for method in _METHODS if not callable(getattr(plugin, method, None))]:
        raise VisionPluginError(f"the vision plug-in of {source} has no method {', '.join(missing)}")
    for method in ("name", "image_start", "image_end"):
        if not isinstance(value := getattr(plugin, method)(), str):
            raise VisionPluginError(f"{method} of the vision plug-in of {source} must return a text, got {value!r}")
    for method, least in (("placeholder_token_id", 0), ("num_image_embeds", 1)):
        value = getattr(plugin, method)()
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            reason = f"must return a whole number of at least {least}, got {value!r}"
            raise VisionPluginError(f"{method} of the vision plug-in {plugin.name()!r} {reason}")
    found: VisionPlugin = plugin
    return found
