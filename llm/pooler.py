"""Turns the hidden states of a prompt into its embeddings or its scores, see `raylens.modeling.pooling`."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from raylens.llm.models.family import LanguageFamily
from raylens.modeling.checkpoint_files import read_tensors
from raylens.modeling.pooling import Dense, Pooling

_Layer = Callable[[torch.Tensor], torch.Tensor]


class Pooler:
    """Pools the prompts of one model. Hidden states come in parts, because a long prompt is computed in chunks."""

    def __init__(
        self,
        pooling: Pooling,
        model: PreTrainedModel,
        family: LanguageFamily,
        *,
        checkpoint: str,
        revision: str | None,
    ) -> None:
        """Raises ValueError for a checkpoint without the layers' weights."""
        self._pooling = pooling
        self._like = next(model.parameters())
        read = partial(_read_linear, checkpoint, revision, self._like)
        self._layers: list[_Layer] = []
        if pooling.module is not None:
            self._layers.append(model.get_submodule(pooling.module))
        if pooling.score_tokens is not None:
            tokens = [token for token in pooling.score_tokens if token is not None]
            self._layers.append(partial(_difference, model, family, tokens))
        if pooling.labels:
            self._layers.append(read("", "score"))
        for dense in pooling.dense:
            self._layers += [read(f"{dense.folder}/", "linear"), _activation(dense)]

    def first_position(self, num_prompt_tokens: int) -> int:
        """Returns the first position of a prompt whose hidden state is pooled. All later ones are, too."""
        return num_prompt_tokens - 1 if self._pooling.rows == "last" else 0

    def part(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what `result` needs of some consecutive hidden states, (num_tokens, hidden_size), float32 on the
        CPU."""
        rows = hidden.float().sum(0, keepdim=True) if self._pooling.rows == "mean" else self._projected(hidden)
        return rows.float().cpu()

    def result(self, parts: Sequence[torch.Tensor], num_tokens: int) -> torch.Tensor:
        """Returns the vectors or scores of a prompt, float32 (num_rows, size). `parts`: of all its pooled positions,
        `num_tokens` of them."""
        rows = torch.cat([*parts])
        if self._pooling.rows == "mean":
            mean = (rows.sum(0, keepdim=True) / num_tokens).to(self._like.device, self._like.dtype)
            rows = self._projected(mean).float().cpu()
        return nn.functional.normalize(rows, dim=-1) if self._pooling.normalizes else rows

    def _projected(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self._layers:
            hidden = layer(hidden)
        return hidden


def _difference(
    model: PreTrainedModel, family: LanguageFamily, tokens: Sequence[int], hidden: torch.Tensor
) -> torch.Tensor:
    """Returns the first token's logit, less the second one's if there is one, (num_tokens, 1)."""
    logits = family.logits(model, hidden).float()[:, [*tokens]]
    return logits[:, :1] - logits[:, 1:].sum(-1, keepdim=True)


def _read_linear(checkpoint: str, revision: str | None, like: torch.Tensor, folder: str, name: str) -> nn.Linear:
    """Returns a linear layer of the checkpoint that is no part of the model's class, in the dtype and on the device of
    `like`. Raises ValueError if it is not there."""
    found = read_tensors(checkpoint, folder, [f"{name}.weight", f"{name}.bias"], revision)
    if (weight := found.get(f"{name}.weight")) is None:
        raise ValueError(f"{checkpoint} lacks {folder}{name}.weight")
    bias = found.get(f"{name}.bias")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}), assign=True)
    return layer.to(like.device, like.dtype).requires_grad_(False)


def _activation(dense: Dense) -> nn.Module:
    found: nn.Module = getattr(nn, dense.activation)()
    return found
