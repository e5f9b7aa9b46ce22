"""The vision half of LLaVA, for LLaMA and Vicuna: CLIP's vision tower and a projector.

Options: `vision_model`, the folder or hub id of a CLIP model, and `projector`, a folder or hub id with the file
`mm_projector.bin` that LLaVA's authors publish. Sources: https://arxiv.org/abs/2304.08485 for version 1,
https://arxiv.org/abs/2310.03744 for 1.5."""

from typing import Any

import torch
from PIL import Image
from torch import nn

from raylens.preprocess.vision_plugins.interface import PluginParams, VisionPluginError

_FEATURE_LAYER = -2
"""The tower's layer whose output is projected."""

_REPOSITORIES = {
    "llava-v1.5": ("openai/clip-vit-large-patch14-336", "liuhaotian/llava-v1.5-7b"),
    "llava-v1.5-13b": ("openai/clip-vit-large-patch14-336", "liuhaotian/llava-v1.5-13b"),
}
"""The hub's CLIP model and projector of each plug-in, which are the defaults of the options."""

available_pipelines = list(_REPOSITORIES)


class LlavaPlugin:
    """LLaVA 1.5: pictures are padded to squares, and each patch of CLIP's tower takes a position."""

    def __init__(self, name: str, params: PluginParams) -> None:
        from transformers import CLIPVisionConfig

        vision_model, projector = _REPOSITORIES[name]
        self._name = name
        self._params = params
        self._vision_model: str = params.get("vision_model", vision_model)
        self._projector_place: str = params.get("projector", projector)
        config = CLIPVisionConfig.from_pretrained(self._vision_model, trust_remote_code=False)
        self._num_embeds: int = (config.image_size // config.patch_size) ** 2

    def name(self) -> str:
        return self._name

    def image_start(self) -> str:
        return ""

    def image_end(self) -> str:
        return ""

    def placeholder_token_id(self) -> int:
        return 0

    def num_image_embeds(self) -> int:
        return self._num_embeds

    def load(self) -> None:
        from transformers import CLIPImageProcessorPil, CLIPVisionModel

        from raylens.preprocess.vision_plugins.parts import PlacedPart, read_weights

        self._image_processor = CLIPImageProcessorPil.from_pretrained(self._vision_model, trust_remote_code=False)
        # CLIP's own repository has a pickle only, of which `weights_only` reads tensors and nothing else.
        tower = CLIPVisionModel.from_pretrained(self._vision_model, trust_remote_code=False, weights_only=True)
        self._tower = PlacedPart(tower, self._params["vision_device"], self._params["vision_bits"])
        projector = _projector(read_weights(self._projector_place, "mm_projector.bin"))
        self._projector = PlacedPart(projector, self._params["projector_device"], self._params["projector_bits"])

    @torch.inference_mode()
    def embed_images(self, images: list[Image.Image]) -> torch.Tensor:
        background = tuple(int(mean * 255) for mean in self._image_processor.image_mean)
        squares = [_square(image, background) for image in images]
        pixels = self._image_processor(squares, return_tensors="pt")["pixel_values"]
        features = self._tower(pixels, output_hidden_states=True).hidden_states[_FEATURE_LAYER]
        # The first position is that of CLIP's class token.
        embeds: torch.Tensor = self._projector(features[:, 1:])
        return embeds


def get_pipeline(name: str, params: PluginParams) -> LlavaPlugin | None:
    return LlavaPlugin(name, params) if name in _REPOSITORIES else None


def get_pipeline_from_model_name(model_name: str, params: PluginParams) -> LlavaPlugin | None:
    name = model_name.lower()
    if "llava-v1.5" not in name:
        return None
    return LlavaPlugin("llava-v1.5-13b" if "13b" in name else "llava-v1.5", params)


def _projector(weights: dict[str, Any]) -> nn.Module:
    """Returns two linear layers with a GELU between them, with the weights `...mm_projector.0` and `.2`."""
    own = {name.rpartition("mm_projector.")[2]: weight for name, weight in weights.items() if "mm_projector." in name}
    if own.keys() != {"0.weight", "0.bias", "2.weight", "2.bias"}:
        raise VisionPluginError(f"mm_projector.bin has weights {sorted(weights)}, not those of LLaVA 1.5's projector")
    sizes = own["0.weight"].shape[1], own["0.weight"].shape[0], own["2.weight"].shape[0]
    projector = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.GELU(), nn.Linear(sizes[1], sizes[2]))
    projector.load_state_dict({name: weight.float() for name, weight in own.items()})
    return projector


def _square(image: Image.Image, background: tuple[int, ...]) -> Image.Image:
    """Returns the picture in the middle of a square as large as its longer side."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), background)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
