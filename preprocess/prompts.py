"""Prompts of every form - chat messages, text, token ids - to final token ids and placeholder ranges."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from preprocess.models.family import HFProcessor, ProcessorFamily
from preprocess.prompt_tokenizer import PromptTokenizer, TokenIds
from preprocess.prompt_updates import (
    PromptReplacement,
    PromptRules,
    apply_updates,
    tokens_of_target,
    without_special_tokens,
)
from preprocess.schema import (
    ChatPrompt,
    InvalidRequestError,
    ItemInfo,
    Message,
    PlaceholderRange,
    ProcessedPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
)


class PromptRenderer:
    """Renders the prompts of one model. Not thread-safe."""

    def __init__(
        self,
        processor: HFProcessor,
        family: ProcessorFamily,
        hf_tokenizer: Any,
        tokenizer: PromptTokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self._processor = processor
        self._family = family
        self._hf_tokenizer = hf_tokenizer
        self._tokenizer = tokenizer
        self._template = processor.chat_template or hf_tokenizer.chat_template
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._longest_token = max(len(token) for token in hf_tokenizer.get_vocab())
        merged = processor._merge_kwargs(tokenizer_init_kwargs=hf_tokenizer.init_kwargs)
        self._add_special_tokens: bool = merged["text_kwargs"].get("add_special_tokens", True)
        embed_tokens = {modality.embed_token(processor) for modality in family.modalities.values()}
        self._embed_ids = [tokenizer.token_id(token) for token in embed_tokens]
        self._rules = PromptRules(
            updates={name: modality.update(processor) for name, modality in family.modalities.items()},
            frame=family.frame(processor),
            adds_special_tokens=self._add_special_tokens,
            keeps_special_tokens=family.keeps_special_tokens,
        )

    def render(self, prompt: Prompt, items: Sequence[ItemInfo], hashes: Sequence[str]) -> ProcessedPrompt:
        """Expands a prompt of any form for its items, those of a modality in prompt order, with their content hashes.

        A prompt given as text and the same one given as the ids of that text come out the same. Raises
        InvalidRequestError when placeholders and items do not match or no room is left in the context to answer.
        """
        try:
            ids, placeholders = self._expand(self._ids(prompt), items)
        except InvalidRequestError as error:
            raise error.for_field("messages" if isinstance(prompt, ChatPrompt) else "prompt") from None
        return ProcessedPrompt(ids, placeholders, list(hashes))

    def _ids(self, prompt: Prompt) -> TokenIds:
        if isinstance(prompt, TokensPrompt):
            return self._rewritten_ids(self._checked_ids(prompt.token_ids))
        if isinstance(prompt, TextPrompt):
            self._check_length(len(prompt.text))
            text = self._rewritten(prompt.text)
            return self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens)
        self._check_length(sum(len(part.get("text", "")) for message in prompt.messages for part in message["content"]))
        text = self._rewritten(self._fill_template(prompt.messages))
        bos = self._hf_tokenizer.bos_token
        add_special_tokens = self._add_special_tokens and not (bos and text.startswith(bos))
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, is_marked=True)

    def _checked_ids(self, ids: Sequence[int]) -> TokenIds:
        array = np.asarray(ids, dtype=np.int64)
        if array.ndim != 1 or array.min(initial=0) < 0 or array.max(initial=0) >= self._vocab_size:
            raise InvalidRequestError(
                f"token ids must be from 0 to {self._vocab_size - 1}", field="prompt", code="invalid_token_id"
            )
        return array.astype(np.int32)

    def _rewritten(self, text: str) -> str:
        rewrite = self._family.rewrite_text
        return text if rewrite is None else rewrite(self._processor, text)

    def _rewritten_ids(self, ids: TokenIds) -> TokenIds:
        """The ids of the rewritten text if that differs, else the client's own."""
        if self._family.rewrite_text is None:
            return ids
        text = self._tokenizer.decode(without_special_tokens(ids, self._tokenizer))
        rewritten = self._rewritten(text)
        if rewritten == text:
            return ids
        return self._tokenizer.encode(rewritten, add_special_tokens=self._add_special_tokens)

    def dummy_prompt(self, num_items: Mapping[str, int]) -> TokensPrompt:
        """A prompt of nothing but placeholders, for so many items of each modality."""
        ids: list[int] = []
        for modality, update in self._rules.updates.items():
            if isinstance(update, PromptReplacement):
                ids += tokens_of_target(update.target, self._tokenizer).tolist() * num_items.get(modality, 0)
        return TokensPrompt(ids)

    def _expand(self, ids: TokenIds, items: Sequence[ItemInfo]) -> tuple[list[int], list[PlaceholderRange]]:
        if self._family.requires_items and not items:
            wanted = ", ".join(self._family.modalities)
            raise InvalidRequestError(
                f"this model takes no text alone, send media ({wanted}) with it", field="prompt", code="media_required"
            )
        pairs = [(item.modality, item.expansion) for item in items]
        final, placeholders = apply_updates(ids, pairs, self._rules, self._tokenizer)
        num_positions = sum(int((final == embed_id).sum()) for embed_id in self._embed_ids)
        num_embeds = sum(item.num_embeds for item in items)
        if num_positions != num_embeds:
            raise InvalidRequestError(
                f"the prompt has {num_positions} positions for embeddings, its media fill {num_embeds}",
                field="prompt",
                code="placeholder_mismatch",
            )
        if len(final) >= self._max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(final)} tokens, the context of {self._max_model_len} tokens"
                " leaves no room for an answer",
                field="prompt",
                code="context_length_exceeded",
            )
        return final.tolist(), placeholders

    def _check_length(self, num_chars: int) -> None:
        """Refuses what cannot fit however it is tokenised, before time is spent on it."""
        if num_chars > self._max_model_len * self._longest_token:
            raise InvalidRequestError(
                f"{num_chars} characters of text are more than the context of {self._max_model_len} tokens can hold",
                field="messages",
                code="context_length_exceeded",
            )

    def _fill_template(self, messages: Sequence[Message]) -> str:
        """Control tokens and placeholders that a user typed come out marked, to be tokenised as ordinary text."""
        if not isinstance(self._template, str):
            raise InvalidRequestError("this model has no chat template", field="messages", code="no_chat_template")
        (marked,), _, _, _ = self._hf_tokenizer._mark_chat_inputs(
            self._template, [list(messages)], None, None, {}, True, False
        )
        try:
            text: str = self._processor.apply_chat_template(
                marked, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            raise InvalidRequestError(
                "the model's chat template does not accept these roles or contents",
                field="messages",
            ) from error
        return text
