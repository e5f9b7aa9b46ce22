"""A model family's declaration for the engine, with the defaults that fit most families."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.llm.prompt_layout import PLAIN, PromptLayout
from raylens.llm.states.cross_source import CrossSource
from raylens.modeling.half_model import HalfModel
from raylens.preprocess.schema import ProcessedPrompt


def embed_tokens(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    embeds: torch.Tensor = model.get_input_embeddings()(token_ids)
    return embeds


def no_inputs(model: PreTrainedModel, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {}


def deepstack_inputs(item_mask: torch.Tensor, levels: Sequence[torch.Tensor]) -> dict[str, Any]:
    return {"visual_pos_masks": item_mask, "deepstack_visual_embeds": levels}


def output_head(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.get_output_embeddings()(hidden)
    return logits


def capped_output_head(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    logits = output_head(model, hidden)
    softcap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossFamily:
    """Cross attention of a decoder: to states beside its own tokens.

    `attention`: the name of the modules that attend to them. `states`: the decoder's argument for the states,
    (1, num_states, hidden_size).
    `split`: returns the decoder's part of a prompt, without items, and the origin of the states. Raises
    InvalidRequestError if the items do not fit it.
    `encoder`: the path of the text encoder in the model. It takes `inputs_embeds`. None: the states are the items'
    embeddings.
    `positions`: the name of the decoder's module that looks up embeddings of positions, which it would count from 0 in
    every chunk. None: the decoder takes `position_ids`.
    `inputs_of_rows`: returns further inputs of the decoder, by whether each token sees states of its own, bool
    (num_tokens,)."""

    attention: str
    states: str
    split: Callable[[PreTrainedModel, ProcessedPrompt], tuple[ProcessedPrompt, CrossSource]]
    encoder: str | None = None
    positions: str | None = None
    inputs_of_rows: Callable[[torch.Tensor], dict[str, torch.Tensor]] = lambda is_own: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageFamily(HalfModel):
    """The language half of a model, see `HalfModel`.

    `decoder`: the path of the decoder in the model. The decoder takes `inputs_embeds` and `position_ids`.
    `layout`: returns the `PromptLayout` of a prompt; raises InvalidRequestError if the items do not fit it.
    `embed_tokens`: returns the embeddings (num_tokens, hidden_size) of token ids (num_tokens,).
    `inputs_of_tokens`: returns further inputs of the decoder that depend on the token ids, by name. Here and in
    `embed_tokens` the ids of items' placeholders are 0 unless `adds_embeddings` or `keeps_placeholders`.
    `keeps_placeholders`: whether `inputs_of_tokens` needs the ids of placeholders, which are in the vocabulary.
    `takes_item_mask`: whether the decoder takes `item_mask`, (1, num_tokens) bool, True for tokens with an item
    embedding. Steps without such tokens pass no mask.
    `adds_embeddings`: whether item embeddings are added to the embeddings of their placeholders, not substituted.
    `num_deepstack_levels`: returns the number of further embeddings of each item position. They follow the first
    embedding on the last axis. By default, the output of each of the decoder's first layers gets one of them added.
    `deepstack_inputs`: returns the decoder's inputs for these levels, each (num_embeds, hidden_size), and the item
    mask, (1, num_tokens) bool, True for tokens with an item embedding.
    `num_rope_axes`: the number of rotary positions of a token. `has_spans`: whether `layout` has bidirectional spans.
    `windows_cut_spans`: whether a layer's sliding window also applies within a span. `spans_need_window`: whether
    layers without a sliding window are causal within spans, too.
    `cross`: the decoder's cross attention; None: it has none.
    `logits`: returns the logits (num_rows, vocab) of hidden states (num_rows, hidden_size): all operations of the
    Hugging Face class after its decoder."""

    unused: tuple[str, ...] = ("model.vision_tower", "model.multi_modal_projector")
    decoder: str = "model.language_model"
    layout: Callable[[PreTrainedModel, ProcessedPrompt], PromptLayout] = lambda model, prompt: PLAIN
    embed_tokens: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor] = embed_tokens
    inputs_of_tokens: Callable[[PreTrainedModel, torch.Tensor], dict[str, torch.Tensor]] = no_inputs
    keeps_placeholders: bool = False
    takes_item_mask: bool = False
    adds_embeddings: bool = False
    num_deepstack_levels: Callable[[PreTrainedConfig], int] = lambda config: 0
    deepstack_inputs: Callable[[torch.Tensor, Sequence[torch.Tensor]], dict[str, Any]] = deepstack_inputs
    num_rope_axes: int = 1
    has_spans: bool = False
    windows_cut_spans: bool = True
    spans_need_window: bool = False
    cross: CrossFamily | None = None
    logits: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor] = output_head

    def find_decoder(self, model: PreTrainedModel) -> nn.Module:
        """Raises ValueError for a model of another structure than the family's."""
        try:
            decoder: nn.Module = model.get_submodule(self.decoder)
        except AttributeError as error:
            raise ValueError(
                f"text models of type {type(model).__name__} are not supported: there is no decoder at {self.decoder!r}"
            ) from error
        return decoder
