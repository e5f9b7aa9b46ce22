"""The vision half of MiniGPT-4, for Vicuna: BLIP-2's vision tower and Q-Former, and one linear layer.

Options: `vision_model`, the folder or hub id of a BLIP-2 model, and `projector`, a folder, hub id or file with the
weights of the layer, `pretrained_minigpt4.pth` as MiniGPT-4's authors publish it. Source:
https://arxiv.org/abs/2304.10592."""

from typing import Any

import torch
from PIL import Image
from torch import nn

from raylens.preprocess.vision_plugins.interface import PluginParams, VisionPluginError

_NAME = "minigpt4"

available_pipelines = [_NAME]


class MiniGPT4Plugin:
    """MiniGPT-4: each picture becomes the outputs of as many queries as the Q-Former has."""

    def __init__(self, params: PluginParams) -> None:
        from transformers import Blip2Config

        self._params = params
        self._vision_model: str = params.get("vision_model", "Salesforce/blip2-flan-t5-xxl")
        self._projector_place: str = params.get("projector", "Vision-CAIR/MiniGPT-4")
        config = Blip2Config.from_pretrained(self._vision_model, trust_remote_code=False)
        self._num_queries: int = config.num_query_tokens

    def name(self) -> str:
        return _NAME

    def image_start(self) -> str:
        return "<Img>"

    def image_end(self) -> str:
        return "</Img>"

    def placeholder_token_id(self) -> int:
        return 1

    def num_image_embeds(self) -> int:
        return self._num_queries

    def load(self) -> None:
        from transformers import Blip2ForConditionalGeneration, BlipImageProcessorPil

        from raylens.modeling.half_model import load_half, without
        from raylens.modeling.model_configs import load_model_config
        from raylens.preprocess.vision_plugins.parts import PlacedPart, read_weights

        self._image_processor = BlipImageProcessorPil.from_pretrained(self._vision_model, trust_remote_code=False)
        half = without(Blip2ForConditionalGeneration, "language_model", "language_projection")
        tower = _Queries(
            load_half(
                half,
                self._vision_model,
                config=load_model_config(self._vision_model),
                half="vision",
                renamings={},
                dtype=torch.float32,
            )
        )
        self._tower = PlacedPart(tower, self._params["vision_device"], self._params["vision_bits"])
        projector = _projector(read_weights(self._projector_place, "pretrained_minigpt4.pth"))
        self._projector = PlacedPart(projector, self._params["projector_device"], self._params["projector_bits"])

    @torch.inference_mode()
    def embed_images(self, images: list[Image.Image]) -> torch.Tensor:
        pixels = self._image_processor(images, return_tensors="pt")["pixel_values"]
        embeds: torch.Tensor = self._projector(self._tower(pixels))
        return embeds


class _Queries(nn.Module):
    """BLIP-2's tower and its Q-Former."""

    def __init__(self, blip: Any) -> None:
        super().__init__()
        self.blip = blip

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Takes (num_pictures, 3, height, width). Returns (num_pictures, num_queries, size of the Q-Former)."""
        patches = self.blip.vision_model(pixels).last_hidden_state
        queries = self.blip.query_tokens.expand(len(patches), -1, -1)
        output: torch.Tensor = self.blip.qformer(query_embeds=queries, encoder_hidden_states=patches).last_hidden_state
        return output


def get_pipeline(name: str, params: PluginParams) -> MiniGPT4Plugin | None:
    return MiniGPT4Plugin(params) if name == _NAME else None


def get_pipeline_from_model_name(model_name: str, params: PluginParams) -> MiniGPT4Plugin | None:
    return MiniGPT4Plugin(params) if "minigpt4" in model_name.lower().replace("-", "") else None


def _projector(weights: dict[str, Any]) -> nn.Linear:
    """Returns the linear layer with the weights `llama_proj`, which may stand under `model`."""
    found = weights.get("model", weights)
    if not {"llama_proj.weight", "llama_proj.bias"} <= found.keys():
        raise VisionPluginError(f"the weights of MiniGPT-4's layer are {sorted(found)[:4]}, without llama_proj")
    weight, bias = found["llama_proj.weight"].float(), found["llama_proj.bias"].float()
    projector = nn.Linear(weight.shape[1], weight.shape[0])
    projector.load_state_dict({"weight": weight, "bias": bias})
    return projector
