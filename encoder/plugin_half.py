"""Makes a vision plug-in the vision half of a text model: it takes the items of a batch and returns embeddings."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn

from raylens.encoder.config import EncoderConfig
from raylens.encoder.models.family import VisionFamily, VisionModality, all_together
from raylens.encoder.time_limit import GivenUpError, TimeLimit
from raylens.modeling.model_configs import load_model_config
from raylens.preprocess.schema import ItemTensors
from raylens.preprocess.vision_plugins.interface import VisionPlugin, VisionPluginError
from raylens.preprocess.vision_plugins.registry import VisionPluginChoice, find_plugin


class PluginHalf(nn.Module):
    """A plug-in with its weights, for a text model of a hidden size. Its cost of a picture is the same for all."""

    def __init__(self, plugin: VisionPlugin, config: Any, timeout_s: float) -> None:
        """`config`: the configuration of the text model. `timeout_s`: how many seconds a call may take."""
        super().__init__()
        self.config = config
        self._plugin = plugin
        self._limit = TimeLimit(timeout_s)
        self.is_measured = False
        """While true, calls run on the caller's thread, where their memory can be counted, without a time limit."""

    @property
    def has_hung(self) -> bool:
        """Returns whether a call was given up. It still takes memory, and perhaps a processor."""
        return self._limit.num_given_up > 0

    def embed(self, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
        """Takes items with `pixels`, (height, width, 3) uint8 on the CPU. Returns (num_image_embeds, hidden_size) of
        each.

        Raises VisionPluginError where the plug-in fails, takes too long or returns something else."""
        images = [Image.fromarray(item["pixels"].numpy()) for item in items]
        name = self._plugin.name()
        try:
            embeds = self._embed(images) if self.is_measured else self._limit.run(lambda: self._embed(images))
        except torch.AcceleratorError:
            raise
        except GivenUpError as error:
            raise VisionPluginError(f"the vision plug-in {name!r} took {error} for this picture") from error
        except Exception as error:
            raise VisionPluginError(f"the vision plug-in {name!r} failed on this picture") from error
        expected = (len(images), self._plugin.num_image_embeds(), self.config.get_text_config().hidden_size)
        shape = tuple(embeds.shape) if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        if shape != expected:
            raise VisionPluginError(
                f"the vision plug-in {name!r} returned embeddings of shape {shape}, it should be {expected}"
            )
        return list(embeds)

    @torch.inference_mode()
    def _embed(self, images: list[Image.Image]) -> Any:
        return self._plugin.embed_images(images)


def load_plugin_half(config: EncoderConfig, choice: VisionPluginChoice) -> tuple[PluginHalf, VisionFamily]:
    """Returns the chosen plug-in, with its weights loaded, and how it encodes pictures.

    Raises VisionPluginError if there is no such plug-in, or if it cannot load."""
    plugin = find_plugin(choice, config.model)
    try:
        getattr(plugin, "load", lambda: None)()
    except Exception as error:
        raise VisionPluginError(f"the vision plug-in {plugin.name()!r} cannot load: {error!r}") from error
    num_embeds = plugin.num_image_embeds()
    image = VisionModality(
        encode=lambda model, items: model.embed(items),
        num_patches=lambda config, item: num_embeds,
        batch_key=all_together,
        on_host=frozenset({"pixels"}),
    )
    half = PluginHalf(plugin, load_model_config(config.model, config.revision), config.plugin_timeout_s)
    # The plug-in has no parts that the encoder could place, divide or record.
    return half, VisionFamily(whole="", unused=(), tower="", projector=(), modalities={"image": image})
