"""Phi-4 multimodal: the rows of a picture's crops, without padding, and those of a small view of the whole."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Phi4MultimodalConfig, Phi4MultimodalForCausalLM, PreTrainedModel

from raylens.encoder.models.family import VisionFamily, VisionModality, all_together
from raylens.encoder.models.pixels import count_patches
from raylens.preprocess.schema import ItemTensors

_EMBED = "model.embed_tokens_extend.image_embed"
_FIELDS = ("image_pixel_values", "image_sizes", "image_attention_mask")


class UnmaskedPhi4Multimodal(Phi4MultimodalForCausalLM):
    """transformers' model, in which all patches of a crop see each other. Its own tower attends causally as long as no
    picture of the call has padding, because it then has no mask."""

    def __init__(self, config: Phi4MultimodalConfig) -> None:
        super().__init__(config)
        for layer in self.get_submodule(_EMBED).img_processor.encoder.layers:
            layer.self_attn.is_causal = False


def _encode(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    embed: Any = model.get_submodule(_EMBED)
    return [_encode_one(embed, item) for item in items]


def _encode_one(embed: Any, item: ItemTensors) -> torch.Tensor:
    """Returns a picture's embeddings. The module writes them over a prompt's, here of placeholders only."""
    parameter = embed.global_img_feature_extensor
    num_embeds, token_id = _num_embeds(embed, item), embed.config.vision_config.image_token_id
    prompt = torch.full((1, num_embeds), token_id, device=parameter.device)
    fields = {name: item[name].unsqueeze(0) for name in _FIELDS}
    written: torch.Tensor = embed(prompt, parameter.new_empty(*prompt.shape, embed.config.hidden_size), **fields)
    return written[0]


def _num_embeds(embed: Any, item: ItemTensors) -> int:
    """Returns the number of embeddings of the view, of a mark, and of the rows without padding, each with its end."""
    side = math.isqrt(embed.num_img_tokens)
    num_columns = int(item["image_sizes"][1]) // embed.crop_size
    is_seen = item["image_attention_mask"][1:, ::2, ::2]
    num_rows = int(is_seen[::num_columns, :, 0].sum())
    return side * (side + 1) + 1 + int(is_seen.sum()) + num_rows


PHI4_MULTIMODAL = VisionFamily(
    whole=UnmaskedPhi4Multimodal,
    unused=(
        *("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb"),
        *("model.embed_tokens_extend.audio_embed", "lm_head"),
    ),
    tower=f"{_EMBED}.img_processor",
    projector=(
        *(f"{_EMBED}.img_projection_up", f"{_EMBED}.img_projection_down"),
        *(f"{_EMBED}.global_img_feature_extensor", f"{_EMBED}.sub_img_feature_extensor"),
    ),
    modalities={
        "image": VisionModality(
            encode=_encode,
            num_patches=count_patches("image_pixel_values"),
            batch_key=all_together,
            on_host=frozenset({"image_sizes"}),
        )
    },
)
