"""Embeddings of n-grams within a decoder's layers (Qwen4's PLE), which keep the last tokens as a state.

`RecurrentStates` runs modules that take one tensor. So that tensor has the bits of each token id behind its hidden
states."""

from typing import Any

import torch
from torch import nn


def find_token_mixers(decoder: nn.Module) -> list[nn.Module]:
    """Returns the modules with such a state. Their layers call them with the ids from then on."""
    mixers = []
    for layer in getattr(decoder, "layers", ()):
        if getattr(layer, "ple", None) is not None:
            layer.ple = _WithTokens(layer.ple)
            mixers.append(layer.ple.mixer)
    return mixers


class _WithTokens(nn.Module):
    """Takes the place of a module in its layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.mixer = _TokenMixer(module)

    def forward(self, hidden_states: torch.Tensor, token_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        bits = token_ids.to(torch.int32).unsqueeze(-1).view(hidden_states.dtype)
        output: torch.Tensor = self.mixer(torch.cat([hidden_states, bits], dim=-1))
        return output[..., : hidden_states.shape[-1]]


class _TokenMixer(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = (module,)  # not a child: it has the index of the layer, as the layer's own state has
        self._size: int = module.hidden_size * module.hc_count

    def forward(self, hidden_states: torch.Tensor, past_key_values: Any) -> torch.Tensor:
        """Takes and returns (batch, num_tokens, size + those of a token id)."""
        own, bits = hidden_states[..., : self._size], hidden_states[..., self._size :]
        token_ids = bits.contiguous().view(torch.int32)[..., 0]
        return torch.cat([self._module[0](own, token_ids, past_key_values), bits], dim=-1)
