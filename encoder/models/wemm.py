"""WeMM: pictures of any size through an Idefics2 tower. A convolution joins 4 x 4 patches to one embedding, and two
splitters enclose each picture.

transformers lacks this model. It is written from the published model's description and uses its weight names."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionAttention, Idefics2VisionTransformer

from raylens.encoder.models.family import VisionFamily, VisionModality, all_together
from raylens.encoder.models.pixels import count_patches
from raylens.modeling.wemm_config import WemmConfig
from raylens.preprocess.schema import ItemTensors


class WemmDownsampler(nn.Module):
    """Joins the patches of each square of `stride` x `stride` to one embedding of the language model's size."""

    def __init__(
        self,
        *,
        visual_hidden_size: int,
        llm_hidden_size: int,
        kernel_size: int,
        stride: int,
        depth: int = 2,
        hidden_act: str = "gelu",
        bias: bool = False,
        **_: object,
    ) -> None:
        """The arguments are the checkpoint's `downsampler_config`. `depth` counts the convolution and the linear layers
        after it."""
        super().__init__()
        self.stride = stride
        self.group_op = nn.Conv2d(visual_hidden_size, llm_hidden_size, kernel_size, stride, bias=bias)
        layers: list[nn.Module] = []
        for _level in range(1, depth):
            layers += [ACT2FN[hidden_act], nn.Linear(llm_hidden_size, llm_hidden_size, bias=bias)]
        self.linear_model = nn.Sequential(*layers)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Takes the patches of a picture, (rows, columns, visual_hidden_size). Returns its embeddings, (num_embeds,
        llm_hidden_size), row by row. A side of n patches has ceil(n / stride) embeddings: the last row and column are
        repeated up to a multiple of the stride."""
        grid = patches.unsqueeze(0).permute(0, 3, 1, 2)
        below, right = (-side % self.stride for side in grid.shape[-2:])
        # In float32, because some devices have no half-precision kernel for padding. Padding does not round.
        padded = F.pad(grid.float(), (0, right, 0, below), mode="replicate").to(grid.dtype)
        embeds: torch.Tensor = self.linear_model(self.group_op(padded).squeeze(0).permute(1, 2, 0).flatten(0, 1))
        return embeds


class PackedVisionAttention(Idefics2VisionAttention):
    """Idefics2's attention with the bounds of pictures, which transformers' version drops."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None = None, **bounds: Any
    ) -> tuple[torch.Tensor, None]:
        projected = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
        heads = (one.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for one in projected)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        output, _ = attend(self, *heads, attention_mask, scaling=self.scale, **bounds)
        return self.out_proj(output.flatten(2)), None


class WemmVisionTower(Idefics2VisionTransformer):
    """Idefics2's tower over pictures of any sizes at once, packed on one axis, see `encoder/packed_attention.py`."""

    def __init__(self, config: Idefics2VisionConfig) -> None:
        super().__init__(config)
        for layer in self.encoder.layers:
            layer.self_attn = PackedVisionAttention(config)

    def forward(self, *pictures: torch.Tensor, bounds: torch.Tensor, longest: int) -> torch.Tensor:
        """Takes pixels, (3, height, width) of each picture. Returns (num_patches, visual_hidden_size), concatenated
        over the pictures.

        `bounds`: the cumulative numbers of patches, (num_pictures + 1,) int32. `longest`: the most patches of a
        picture."""
        packed = torch.cat([self._embed(pixels) for pixels in pictures], dim=1)
        hidden = self.encoder(packed, cu_seq_lens_q=bounds, max_length_q=longest).last_hidden_state
        output: torch.Tensor = self.post_layernorm(hidden)[0]
        return output

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns the picture's patches with their position embeddings, (1, num_patches, visual_hidden_size)."""
        mask = torch.ones(1, *_grid(self.config.patch_size, pixels), dtype=torch.bool, device=pixels.device)
        embeds: torch.Tensor = self.embeddings(pixels.unsqueeze(0), patch_attention_mask=mask)
        return embeds


class WemmVisionModel(PreTrainedModel):
    """The vision half of WeMM."""

    config: WemmConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _keys_to_ignore_on_load_unexpected = (r"^language_model\.",)

    def __init__(self, config: WemmConfig) -> None:
        """Raises ValueError for a checkpoint with `do_image_splitting`."""
        super().__init__(config)
        if config.do_image_splitting:
            raise ValueError("do_image_splitting: pictures of WeMM that are cut into parts are not supported")
        self.vision_tower = WemmVisionTower(config.vision_config)
        self.downsampler = WemmDownsampler(**config.downsampler_config)
        self.visual_source_spliter_emb = nn.Embedding(**config.spliter_emb_config)
        self.post_init()

    def get_image_features(self, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Takes pixels, (3, height, width) of each picture, both sides multiples of the patch size. Returns
        (num_embeds, llm_hidden_size) of each."""
        grids = [_grid(self.config.vision_config.patch_size, pixels) for pixels in pictures]
        lengths = [math.prod(grid) for grid in grids]
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        features = self.vision_tower(*pictures, bounds=bounds, longest=max(lengths)).split(lengths)
        embeds = [self.downsampler(own.unflatten(0, grid)) for own, grid in zip(features, grids, strict=True)]
        before, after = self.visual_source_spliter_emb.weight[:2].unsqueeze(1)
        return [torch.cat((before, own, after)) for own in embeds]


def _grid(patch_size: int, pixels: torch.Tensor) -> tuple[int, int]:
    """Returns the rows and columns of patches of (3, height, width)."""
    return pixels.shape[1] // patch_size, pixels.shape[2] // patch_size


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    embeds: list[torch.Tensor] = model.get_image_features([item["pixel_values"] for item in items])
    return embeds


WEMM = VisionFamily(
    whole=WemmVisionModel,
    unused=(),
    tower="vision_tower",
    projector=("downsampler", "visual_source_spliter_emb"),
    modalities={
        "image": VisionModality(encode=_encode, num_patches=count_patches("pixel_values"), batch_key=all_together)
    },
    is_packed=True,
)
