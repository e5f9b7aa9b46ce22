"""A request inside the engine: its prompt, its items, and a sequence for each answer."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from raylens.llm.detokenizer import Detokenizer
from raylens.llm.lora.request import LoraRequest
from raylens.llm.prompt_layout import PromptLayout
from raylens.llm.request_checks import check_embeddings
from raylens.llm.sampling.logprobs import TokenLogprobs
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.llm.sequence import PromptItem, Sequence
from raylens.preprocess.schema import InvalidRequestError, ProcessedPrompt


@dataclass(frozen=True, slots=True)
class AnswerState:
    """The state of one unfinished answer.

    `text`: the answer's text, or None if no stop string can end it.
    `prompt_logprobs`: of the prompt's tokens so far, if the request asks for them."""

    sampler_state: SamplerState
    text: Detokenizer | None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def is_complete_with(self, token_id: int) -> bool:
        """Takes the answer's next token. Returns whether the answer now ends in a stop string or completes its
        structured output."""
        if self.text is not None:
            self.text.append([token_id])
            if self.text.stopped:
                return True
        return self.sampler_state.is_complete


@dataclass(frozen=True, slots=True)
class Request:
    """A request with its unfinished `answers`."""

    prompt: ProcessedPrompt
    items: list[PromptItem]
    answers: dict[Sequence, AnswerState]

    def make_sequences(
        self,
        request_id: str,
        params: SamplingParams,
        layout: PromptLayout,
        *,
        prefix_root: bytes,
        max_model_len: int,
        tenant: str,
        priority: int,
        lora: LoraRequest | None,
    ) -> list[Sequence]:
        """Returns a sequence for each answer. The first computes the prompt; the others take its blocks from the prefix
        cache."""
        prompt_token_ids = self.prompt.prompt_token_ids
        room = max_model_len - len(prompt_token_ids) if params.max_tokens is None else params.max_tokens
        sequences: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(
                request_id=request_id,
                token_ids=list(prompt_token_ids),
                num_prompt_tokens=len(prompt_token_ids),
                items=self.items,
                max_num_tokens=len(prompt_token_ids) + room,
                layout=layout,
                index=index,
                parent=sequences[0] if sequences else None,
                prefix_root=prefix_root,
                tenant=tenant,
                priority=priority,
                lora=lora,
                num_prompt_logprobs=None if sequences else params.prompt_logprobs,
            )
            sequences.append(sequence)
        return sequences


def make_items(prompt: ProcessedPrompt, embeddings: Seq[torch.Tensor | None], embedding_size: int) -> list[PromptItem]:
    """Returns the prompt's items with their embeddings. None: the embeddings arrive later.

    Raises InvalidRequestError if the embeddings do not fit the placeholders.
    """
    if len(embeddings) != len(prompt.placeholders):
        raise InvalidRequestError(
            f"{len(prompt.placeholders)} placeholders but {len(embeddings)} items", field="messages"
        )
    items = []
    for index, item in enumerate(embeddings):
        placeholder, mm_hash = prompt.placeholders[index], prompt.mm_hashes[index]
        if item is not None:
            check_embeddings(index, placeholder, item, embedding_size)
        items.append(PromptItem.at(placeholder, mm_hash, item))
    return items
