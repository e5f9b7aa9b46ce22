"""Rejects requests that can never run, before they are queued."""

import torch

from raylens.llm.prompt_layout import PromptLayout
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.states.cross_source import CrossSource
from raylens.preprocess.schema import InvalidRequestError, PlaceholderRange


def check_room(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> None:
    """Raises InvalidRequestError unless the context holds the prompt and an answer of `min_tokens`. An answer of more
    than the rest of the context ends there, so `max_tokens` is refused only above the whole context."""
    if not 0 < num_prompt_tokens < max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_prompt_tokens} tokens, the context of {max_model_len} tokens has to hold it and an"
            " answer",
            field="messages",
            code="context_length_exceeded",
        )
    if (params.max_tokens or 0) > max_model_len:
        reason = f"{params.max_tokens} tokens are more than the context of {max_model_len} tokens"
        raise InvalidRequestError(reason, field="max_tokens", code="context_length_exceeded")
    if num_prompt_tokens + (params.min_tokens or 0) > max_model_len:
        raise InvalidRequestError(
            f"{params.min_tokens} and the prompt's {num_prompt_tokens} tokens are more than the context of"
            f" {max_model_len} tokens",
            field="min_tokens",
            code="context_length_exceeded",
        )


def check_spans(layout: PromptLayout, max_span_tokens: int) -> None:
    """Raises InvalidRequestError for a span of more than `max_span_tokens`, too many for one step."""
    longest = max((span.end - span.start for span in layout.spans), default=0)
    if longest > max_span_tokens:
        raise InvalidRequestError(
            f"{longest} tokens of the prompt attend to each other and have to be computed in one step, the limit is"
            f" {max_span_tokens}: those of the largest picture and max_num_batched_tokens",
            field="messages",
            code="context_length_exceeded",
        )


def check_states(num_states: int, num_slots: int) -> None:
    """Raises InvalidRequestError if a prompt has more cross states than the cache holds."""
    if num_states > num_slots:
        raise InvalidRequestError(
            f"the answer attends to {num_states} tokens of pictures and text, the cache holds {num_slots} of them",
            field="messages",
            code="context_length_exceeded",
        )


def check_embeddings(index: int, placeholder: PlaceholderRange, embeddings: torch.Tensor, embedding_size: int) -> None:
    """Raises InvalidRequestError unless the embeddings of item `index` are (num_embeds, embedding_size)."""
    expected = [placeholder.num_embeds, embedding_size]
    if list(embeddings.shape) != expected:
        raise InvalidRequestError(
            f"embeddings of shape {list(embeddings.shape)}, for this item the model takes {expected}",
            field="messages",
            code="invalid_tensors",
            item=index,
        )


def check_scoring(source: CrossSource, params: SamplingParams, *, pools: bool) -> None:
    """Raises InvalidRequestError if log-probabilities or hidden states of tokens that are cross states are asked
    for."""
    if pools:
        reason = "the hidden states of this model's decoder do not tell the whole prompt"
        raise InvalidRequestError(reason, field="input")
    if source.num_states and params.prompt_logprobs is not None:
        reason = "the tokens that this model cross-attends to have no probabilities"
        raise InvalidRequestError(reason, field="prompt_logprobs")
