"""WeMM as its description has it: one plain, slow model that computes every prompt anew for each token. It shares no
code with the stages, but for the vision tower, which transformers has.

y = W x + m B A x in every linear layer of the text model, with m = 1 on all positions of a picture, else 0."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from transformers import PreTrainedModel
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

from raylens.modeling.wemm_config import InternLM2Config, WemmConfig

PATCH = 14
GROUP = 4


def reference_size(width: int, height: int, size: dict[str, int]) -> tuple[int, int]:
    """(width, height) of a picture when it is resized, as the published image processor for two thousand pixels has it:
    the longer side is always brought to the longest edge, up or down."""
    longest, shortest = size["longest_edge"], size["shortest_edge"]
    ratio = width / height
    sides = [longest, int(longest / ratio)] if ratio >= 1 else [int(longest * ratio), longest]
    wide, high = (max(shortest, side) for side in sides)
    return wide, high


def reference_pixels(image: Image.Image, size: dict[str, int]) -> torch.Tensor:
    """(3, height, width) of an RGB picture, both sides multiples of the patch size."""
    sides = reference_size(*image.size, size)
    resized = np.asarray(image.resize(sides, Image.Resampling.BILINEAR), dtype=np.float32)
    normalised = (resized * np.float32(1 / 255) - np.float32(0.5)) / np.float32(0.5)
    pixels = torch.from_numpy(normalised).permute(2, 0, 1)
    return F.pad(pixels, (0, -pixels.shape[2] % PATCH, 0, -pixels.shape[1] % PATCH))


def reference_num_embeds(height: int, width: int) -> int:
    """Of a picture of a size in pixels, both sides multiples of the patch size."""
    return math.ceil(height / PATCH / GROUP) * math.ceil(width / PATCH / GROUP) + 2


class PartialLoRA(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int, rank: int) -> None:
        super().__init__()
        self.original_linear = nn.Linear(num_inputs, num_outputs, bias=False)
        self.Plora_A = nn.Linear(num_inputs, rank, bias=False)
        self.Plora_B = nn.Linear(rank, num_outputs, bias=False)

    def forward(self, inputs: torch.Tensor, is_image: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.original_linear(inputs) + is_image[:, None] * self.Plora_B(self.Plora_A(inputs))
        return outputs


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs / (inputs.pow(2).mean(-1, keepdim=True) + self.epsilon).sqrt()


class Attention(nn.Module):
    def __init__(self, config: InternLM2Config) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.theta = config.rope_parameters["rope_theta"]
        fused = self.num_kv_heads * (self.groups + 2) * self.head_dim
        self.wqkv = PartialLoRA(config.hidden_size, fused, config.plora_rank)
        self.wo = PartialLoRA(config.num_attention_heads * self.head_dim, config.hidden_size, config.plora_rank)

    def forward(self, inputs: torch.Tensor, is_image: torch.Tensor) -> torch.Tensor:
        length = len(inputs)
        fused = self.wqkv(inputs, is_image).view(length, self.num_kv_heads, self.groups + 2, self.head_dim)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        heads = []
        for kv_head in range(self.num_kv_heads):
            key, value = self.rotated(fused[:, kv_head, -2]), fused[:, kv_head, -1]
            for group in range(self.groups):
                scores = self.rotated(fused[:, kv_head, group]) @ key.T / self.head_dim**0.5
                heads.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ value)
        output: torch.Tensor = self.wo(torch.cat(heads, dim=-1), is_image)
        return output

    def rotated(self, vectors: torch.Tensor) -> torch.Tensor:
        half = self.head_dim // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(len(vectors), dtype=torch.float32)[:, None] * frequencies
        first, second = vectors[:, :half], vectors[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, config: InternLM2Config) -> None:
        super().__init__()
        self.w1 = PartialLoRA(config.hidden_size, config.intermediate_size, config.plora_rank)
        self.w3 = PartialLoRA(config.hidden_size, config.intermediate_size, config.plora_rank)
        self.w2 = PartialLoRA(config.intermediate_size, config.hidden_size, config.plora_rank)

    def forward(self, inputs: torch.Tensor, is_image: torch.Tensor) -> torch.Tensor:
        gated = F.silu(self.w1(inputs, is_image)) * self.w3(inputs, is_image)
        output: torch.Tensor = self.w2(gated, is_image)
        return output


class Layer(nn.Module):
    def __init__(self, config: InternLM2Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.attention_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, inputs: torch.Tensor, is_image: torch.Tensor) -> torch.Tensor:
        hidden = inputs + self.attention(self.attention_norm(inputs), is_image)
        output: torch.Tensor = hidden + self.feed_forward(self.ffn_norm(hidden), is_image)
        return output


class Decoder(nn.Module):
    def __init__(self, config: InternLM2Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class TextModel(nn.Module):
    """The decoder and its head."""

    def __init__(self, config: InternLM2Config) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def logits(self, embeds: torch.Tensor, is_image: torch.Tensor) -> torch.Tensor:
        """(vocab,) behind the last of the embeddings, (num_tokens, hidden_size)."""
        for layer in self.model.layers:
            embeds = layer(embeds, is_image)
        logits: torch.Tensor = self.output(self.model.norm(embeds[-1]))
        return logits


class Downsampler(nn.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        sizes = settings["visual_hidden_size"], settings["llm_hidden_size"]
        self.group_op = nn.Conv2d(*sizes, settings["kernel_size"], settings["stride"], bias=settings["bias"])
        levels = range(1, settings["depth"])
        linear = [layer for _ in levels for layer in (nn.GELU(), nn.Linear(sizes[1], sizes[1], bias=settings["bias"]))]
        self.linear_model = nn.Sequential(*linear)


def names_in_halves(names: Iterable[str]) -> list[str]:
    """The names of the weights in the halves that the stages load, which are those of the published files but for the
    LoRA's."""
    infixes = {".original_linear.": ".", ".Plora_A.": "_plora_a.", ".Plora_B.": "_plora_b."}
    return [functools.reduce(lambda name, pair: name.replace(*pair), infixes.items(), name) for name in names]


@dataclass(frozen=True)
class Generated:
    """As `generate` returns it: (1, prompt and answer) and, for each token of the answer, (1, vocab)."""

    sequences: torch.Tensor
    logits: list[torch.Tensor]


@dataclass(frozen=True)
class Features:
    """(num_embeds, hidden_size) of each picture."""

    last_hidden_state: list[torch.Tensor]
    pooler_output: None = None


class ReferenceWemm(PreTrainedModel):
    """Weights have the names of the published files. `has_plora` False: the text model's LoRA acts nowhere."""

    config: WemmConfig
    base_model_prefix = ""
    has_plora = True

    def __init__(self, config: WemmConfig) -> None:
        super().__init__(config)
        self.vision_tower = Idefics2VisionTransformer(config.vision_config)
        self.downsampler = Downsampler(config.downsampler_config)
        self.visual_source_spliter_emb = nn.Embedding(**config.spliter_emb_config)
        self.language_model = TextModel(config.text_config)
        self.post_init()

    def embed_picture(self, pixels: torch.Tensor) -> torch.Tensor:
        """(num_embeds, hidden_size) of (3, height, width)."""
        rows, columns = pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
        mask = torch.ones(1, rows, columns, dtype=torch.bool)
        patches = self.vision_tower(pixels[None], patch_attention_mask=mask).last_hidden_state
        grid = patches.view(1, rows, columns, -1).permute(0, 3, 1, 2)
        grid = F.pad(grid, (0, -columns % GROUP, 0, -rows % GROUP), mode="replicate")
        joined = self.downsampler.linear_model(self.downsampler.group_op(grid)[0].permute(1, 2, 0))
        before, after = self.visual_source_spliter_emb(torch.tensor([0, 1]))
        return torch.cat((before[None], joined.flatten(0, 1), after[None]))

    def get_image_features(self, pixel_values: torch.Tensor, patch_attention_mask: torch.Tensor) -> Features:
        """Of pictures padded to the largest of them."""
        sizes = [(int(mask[:, 0].sum()) * PATCH, int(mask[0].sum()) * PATCH) for mask in patch_attention_mask]
        pictures = zip(pixel_values, sizes, strict=True)
        return Features([self.embed_picture(pixels[:, :height, :width]) for pixels, (height, width) in pictures])

    @torch.inference_mode()
    def answer(self, texts: list[list[int]], pictures: list[torch.Tensor], num_tokens: int) -> list[int]:
        """The greedy tokens behind texts, given as token ids, with a picture, (3, height, width), between any two."""
        embeds, is_image = [], []
        for index, text in enumerate(texts):
            parts = [self._embed(text), *([self.embed_picture(pictures[index])] if index < len(pictures) else [])]
            embeds += parts
            is_image += [torch.full((len(part),), float(place)) for place, part in enumerate(parts)]
        return [int(logits.argmax()) for logits in self._greedy(torch.cat(embeds), torch.cat(is_image), num_tokens)]

    @torch.inference_mode()
    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, **inputs: Any) -> Generated:
        """Greedily. Placeholders stand behind the vocabulary."""
        is_image = input_ids[0] >= self.config.text_config.vocab_size
        embeds = self._embed(input_ids[0].masked_fill(is_image, 0).tolist())
        if is_image.any():
            features = self.get_image_features(inputs["pixel_values"], inputs["patch_attention_mask"])
            embeds[is_image] = torch.cat(features.last_hidden_state)
        logits = self._greedy(embeds, is_image.float(), max_new_tokens)
        answer = torch.stack([one.argmax() for one in logits])
        return Generated(torch.cat((input_ids[0], answer))[None], [one[None] for one in logits])

    def _embed(self, ids: list[int]) -> torch.Tensor:
        embeds: torch.Tensor = self.language_model.model.tok_embeddings(torch.tensor(ids, dtype=torch.long))
        return embeds

    def _greedy(self, embeds: torch.Tensor, is_image: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        """The logits (vocab,) from which each token is chosen."""
        chosen: list[torch.Tensor] = []
        for _ in range(num_tokens):
            chosen.append(self.language_model.logits(embeds, is_image if self.has_plora else is_image * 0))
            embeds = torch.cat((embeds, self._embed([int(chosen[-1].argmax())])))
            is_image = F.pad(is_image, (0, 1))
        return chosen
