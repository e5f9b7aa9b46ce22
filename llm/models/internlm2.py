"""InternLM2 with a partial LoRA (PLoRA): every linear layer has low-rank weights that apply at images' positions only.

The text models of WeMM and InternLM-XComposer2 compute y = W x + m B A x, where m is 1 at the positions of items and 0
elsewhere (https://arxiv.org/abs/2401.16420). Modules have the names of the published files."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from raylens.llm.models.family import LanguageFamily
from raylens.modeling.wemm_config import InternLM2Config

PLORA_RENAMINGS = {r"\.original_linear\.": ".", r"\.Plora_A\.": "_plora_a.", r"\.Plora_B\.": "_plora_b."}
"""From weight names in checkpoints to module names here. Some checkpoints add an infix to weights with a LoRA."""


class PLoRAModule(nn.Module):
    """A module with linear layers that have a partial LoRA."""

    def add_linear(self, name: str, num_inputs: int, num_outputs: int, *, bias: bool, rank: int) -> None:
        """Adds the layer `name` and, unless `rank` is 0, the LoRA's layers `{name}_plora_a` and `{name}_plora_b`."""
        self.add_module(name, nn.Linear(num_inputs, num_outputs, bias=bias))
        if rank:
            self.add_module(f"{name}_plora_a", nn.Linear(num_inputs, rank, bias=False))
            self.add_module(f"{name}_plora_b", nn.Linear(rank, num_outputs, bias=False))

    def linear(self, name: str, inputs: torch.Tensor, item_mask: torch.Tensor | None) -> torch.Tensor:
        """Takes `inputs` (1, num_tokens, num_inputs), returns (1, num_tokens, num_outputs). `item_mask`: (1,
        num_tokens, 1), in the dtype of `inputs`, 1 for tokens with the LoRA, else 0. None: all 0."""
        outputs: torch.Tensor = self.get_submodule(name)(inputs)
        if item_mask is None:
            return outputs
        change: torch.Tensor = self.get_submodule(f"{name}_plora_b")(self.get_submodule(f"{name}_plora_a")(inputs))
        return outputs + item_mask * change


class InternLM2Attention(PLoRAModule):
    """Attention with a fused projection. Its rows, for each key-value head: its query heads, the key, the value."""

    def __init__(self, config: InternLM2Config, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim: int = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        query_size = config.num_attention_heads * self.head_dim
        fused_size = query_size + 2 * config.num_key_value_heads * self.head_dim
        self.add_linear("wqkv", config.hidden_size, fused_size, bias=config.bias, rank=config.plora_rank)
        self.add_linear("wo", query_size, config.hidden_size, bias=config.bias, rank=config.plora_rank)

    def forward(
        self,
        hidden: torch.Tensor,
        item_mask: torch.Tensor | None,
        rotations: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> torch.Tensor:
        groups = self.num_key_value_groups
        fused = self.linear("wqkv", hidden, item_mask)
        fused = fused.view(*hidden.shape[:2], -1, groups + 2, self.head_dim)
        queries, keys, values = torch.split(fused, [groups, 1, 1], dim=-2)
        queries, keys, values = (tensor.flatten(2, 3).transpose(1, 2) for tensor in (queries, keys, values))
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotations)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, _ = attend(self, queries, keys, values, scaling=self.scaling, **kwargs)
        return self.linear("wo", output.flatten(2), item_mask)


class InternLM2MLP(PLoRAModule):
    """w2(act(w1 x) w3 x)."""

    def __init__(self, config: InternLM2Config) -> None:
        super().__init__()
        self.activation = ACT2FN[config.hidden_act]
        sizes, rank = (config.hidden_size, config.intermediate_size), config.plora_rank
        self.add_linear("w1", *sizes, bias=False, rank=rank)
        self.add_linear("w3", *sizes, bias=False, rank=rank)
        self.add_linear("w2", *reversed(sizes), bias=False, rank=rank)

    def forward(self, hidden: torch.Tensor, item_mask: torch.Tensor | None) -> torch.Tensor:
        gate = self.activation(self.linear("w1", hidden, item_mask))
        return self.linear("w2", gate * self.linear("w3", hidden, item_mask), item_mask)


class InternLM2DecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: InternLM2Config, layer_idx: int) -> None:
        super().__init__()
        self.attention = InternLM2Attention(config, layer_idx)
        self.feed_forward = InternLM2MLP(config)
        self.attention_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ffn_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, item_mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), item_mask, **kwargs)
        output: torch.Tensor = hidden + self.feed_forward(self.ffn_norm(hidden), item_mask)
        return output


class InternLM2PreTrainedModel(PreTrainedModel):
    config: InternLM2Config
    base_model_prefix = "model"
    _no_split_modules = ("InternLM2DecoderLayer",)
    _supports_attention_backend = True
    _supports_sdpa = True
    _input_embed_layer = "tok_embeddings"


class InternLM2Model(InternLM2PreTrainedModel):
    """The decoder."""

    def __init__(self, config: InternLM2Config) -> None:
        super().__init__(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(InternLM2DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        item_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Returns the last hidden states, (1, num_tokens, hidden_size). `position_ids`: (1, num_tokens), int64.
        `item_mask`: (1, num_tokens) bool, True for tokens of items; None: all False. The attention function gets
        `attention_mask` and all other arguments."""
        hidden = inputs_embeds
        if item_mask is not None:
            item_mask = item_mask.unsqueeze(-1).to(hidden.dtype) if self.config.plora_rank > 0 else None
        rotations = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, item_mask, rotations=rotations, attention_mask=attention_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(hidden))


class InternLM2ForCausalLM(InternLM2PreTrainedModel):
    """The decoder and its head. The head's weights are called `output`, as in the published files."""

    _keys_to_ignore_on_load_unexpected = (r"^(vit|vision_proj)\.",)
    """The vision half of InternLM-XComposer2."""

    def __init__(self, config: InternLM2Config) -> None:
        super().__init__(config)
        self.model = InternLM2Model(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.output


INTERNLM2 = LanguageFamily(
    whole=InternLM2ForCausalLM, unused=(), renamings=PLORA_RENAMINGS, decoder="model", takes_item_mask=True
)
"""InternLM-XComposer2's language half. With a `plora_rank` of 0, InternLM2 itself."""
