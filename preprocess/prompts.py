"""Turns prompts of every form (chat messages, text, token ids) into final token ids and placeholder ranges."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from raylens.preprocess import schema
from raylens.preprocess.chat_template import OWN_FORMATS, ChatFormats, ChatTemplate
from raylens.preprocess.message_contents import Placeholder
from raylens.preprocess.models.family import HFProcessor, ProcessorFamily
from raylens.preprocess.pooled_inputs import PLAIN, InputForm, PooledInputs
from raylens.preprocess.prompt_tokenizer import PromptTokenizer, TokenIds
from raylens.preprocess.prompt_truncation import Extent, truncate_left
from raylens.preprocess.prompt_updates import PromptReplacement, PromptRules, PromptUpdate, apply_updates

_START_TAG_TOKENS = 16
"""The most tokens at the end of a prompt that make up the start tag of thoughts."""
_KEPT_TEMPLATES = 8
"""Templates of requests, whose forms need not be found again."""
_MAX_CUT_CONTEXTS = 16
"""The length limit of a prompt to be truncated, in contexts: the part that is cut off is tokenised, too."""


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
        formats: ChatFormats = OWN_FORMATS,
        input_form: InputForm = PLAIN,
    ) -> None:
        self._processor = processor
        self._family = family
        self._hf_tokenizer = hf_tokenizer
        self._tokenizer = tokenizer
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
        )
        self._placeholders = {name: self._placeholder(name, update) for name, update in self._rules.updates.items()}
        self._template = ChatTemplate(
            processor, hf_tokenizer, self._placeholders, otherwise=family.chat_template, formats=formats
        )
        self._formats = formats
        self._templates_of_requests = lru_cache(maxsize=_KEPT_TEMPLATES)(self._template_of_request)
        self.tool_calls = self._template.tool_calls
        self._inputs = PooledInputs(
            input_form,
            lambda modality: self._placeholders[modality].text,
            takes_pairs=self._template.takes_pairs,
            frames=family.input_frames,
            processor=processor,
        )

    def render(
        self,
        prompt: schema.Prompt,
        items: Sequence[schema.ItemInfo],
        mm_hashes: Sequence[str],
        *,
        truncation: schema.PromptTruncation | None = None,
    ) -> schema.ProcessedPrompt:
        """Expands a prompt of any form for its `items`, with their content hashes. Items of one modality are in prompt
        order.

        A prompt as text and the same prompt as ids give the same result. `truncation` cuts a too long prompt from the
        left. Raises InvalidRequestError if placeholders and items do not match, or if the context has no room left for
        an answer."""
        started = time.perf_counter()
        given = prompt
        if isinstance(prompt, schema.PooledPrompt):
            prompt = self._inputs.prompt(prompt)
        limit = None if truncation is None else self._limit(truncation)
        try:
            ids, placeholders = self._expand(prompt, items, is_cut=limit is not None)
            numbers = list(range(len(items)))
            if limit is not None and len(ids) > limit:
                expansions = self._numbered(items)
                extents = [self._extent(ids, *pair) for pair in zip(placeholders, expansions, strict=True)]
                ids, placeholders, numbers = truncate_left(ids, placeholders, extents, limit)
                self._check_items([items[number] for number in numbers])
            num_positions = len(ids)
            if not self._family.items_fill_context:
                num_positions -= sum(placeholder.length - 1 for placeholder in placeholders)
            if num_positions >= self._max_model_len:
                raise self._no_room(num_positions)
        except schema.InvalidRequestError as error:
            raise _of_prompt(error, given) from None
        if (shown := self._family.placeholder_id) is not None:
            ids[np.isin(ids, self._embed_ids)] = shown
        # So far only the items within each modality are in prompt order.
        placed = sorted(zip(placeholders, numbers, strict=True), key=lambda one: one[0].offset)
        order = [number for _, number in placed]
        thoughts = self._thoughts_behind(prompt, ids)
        return schema.ProcessedPrompt(
            prompt_token_ids=ids.tolist(),
            placeholders=[placeholder for placeholder, _ in placed],
            mm_hashes=[mm_hashes[number] for number in order],
            language_inputs=[items[number].language_inputs for number in order],
            item_order=None if order == list(range(len(items))) else order,
            is_continued=not isinstance(prompt, schema.ChatPrompt) or prompt.continue_final_message,
            thoughts=thoughts,
            is_thinking=thoughts is not None and self._ends_with(ids, thoughts.start),
            render_seconds=time.perf_counter() - started,
            rendered_at=time.time(),
        )

    def _thoughts_behind(self, prompt: schema.Prompt, ids: TokenIds) -> schema.ThoughtFormat | None:
        """Returns the form of the thoughts that may come before the answer to a prompt. `ids`: of the prompt."""
        is_asked = isinstance(prompt, schema.ChatPrompt) and prompt.add_generation_prompt
        thoughts = self._template_for(prompt).thoughts if isinstance(prompt, schema.ChatPrompt) else None
        # A template that turns thinking off writes empty thoughts.
        return thoughts if is_asked and thoughts is not None and not self._ends_with(ids, thoughts.end) else None

    def _ends_with(self, ids: TokenIds, text: str) -> bool:
        return self._tokenizer.decode(ids[-_START_TAG_TOKENS:]).rstrip().endswith(text)

    def _limit(self, truncation: schema.PromptTruncation) -> int:
        """Returns the most tokens of a truncated prompt. Raises InvalidRequestError if there are none."""
        room = self._max_model_len - max(truncation.num_answer_tokens, 1)
        if room < 1:
            reason = f"{truncation.num_answer_tokens} leave no room in the context of {self._max_model_len} tokens"
            raise schema.InvalidRequestError(reason, field="max_tokens", code="context_length_exceeded")
        return room if truncation.max_prompt_tokens is None else min(room, truncation.max_prompt_tokens)

    def tokenize(self, prompt: schema.ChatPrompt | schema.TextPrompt, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a prompt without media. Raises InvalidRequestError if it is invalid or too long."""
        try:
            ids = self._ids(prompt, add_special_tokens=add_special_tokens and self._add_special_tokens)
        except schema.InvalidRequestError as error:
            raise _of_prompt(error, prompt) from None
        found: list[int] = ids.tolist()
        return found

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included. Raises InvalidRequestError for invalid ids."""
        try:
            return self._tokenizer.decode(self._checked_ids(ids, is_cut=True))
        except schema.InvalidRequestError as error:
            raise error.for_field("tokens") from None

    def _ids(
        self, prompt: schema.Prompt, *, add_special_tokens: bool, has_items: bool = False, is_cut: bool = False
    ) -> TokenIds:
        """Returns the prompt's ids. `add_special_tokens`: with the tokenizer's own BOS and EOS. `has_items`: the prompt
        comes with media. `is_cut`: the prompt may exceed the context, because it is truncated afterwards."""
        if isinstance(prompt, schema.TokensPrompt):
            ids = self._rewritten_ids(self._checked_ids(prompt.token_ids, is_cut=is_cut), add_special_tokens)
            return ids if add_special_tokens else self._tokenizer.without_special_tokens(ids)
        try:
            if isinstance(prompt, schema.TextPrompt | schema.InterleavedPrompt):
                text = self._plain_text(prompt, has_items=has_items)
                self._check_length(len(text), is_cut=is_cut)
                return self._tokenizer.encode(self._rewritten(text), add_special_tokens=add_special_tokens)
            assert isinstance(prompt, schema.ChatPrompt), "render has given a pooled prompt its form"
            self._check_length(prompt.num_chars, is_cut=is_cut)
            text = self._rewritten(self._filled(prompt))
            self._check_length(len(text), is_cut=is_cut)
            bos = self._hf_tokenizer.bos_token
            adds_now = add_special_tokens and not (bos and text.startswith(bos))
            return self._tokenizer.encode(text, add_special_tokens=adds_now, is_marked=True)
        except schema.InvalidRequestError:
            raise
        # Tokenizers raise these for lone surrogates, or if plain text yields a marked control token as well.
        except (TypeError, ValueError) as error:
            reason = "the text cannot be tokenised"
            raise schema.InvalidRequestError(reason, field="prompt", code="invalid_text") from error

    def _filled(self, prompt: schema.ChatPrompt) -> str:
        try:
            return self._template_for(prompt).fill(prompt)
        except schema.ChatTemplateError as error:
            if prompt.template is None:
                raise
            raise schema.InvalidRequestError(str(error), field="chat_template") from error

    def _template_for(self, prompt: schema.ChatPrompt) -> ChatTemplate:
        """Raises InvalidRequestError for a template of the request that is not allowed, or not one."""
        if prompt.template is None:
            return self._template
        if not self._formats.takes_templates:
            reason = "this server takes no templates of requests (chat.trust_request_template is false)"
            raise schema.InvalidRequestError(reason, field="chat_template", code="not_implemented")
        return self._templates_of_requests(prompt.template)

    def _template_of_request(self, template: str) -> ChatTemplate:
        formats = replace(self._formats, template=template)
        try:
            return ChatTemplate(self._processor, self._hf_tokenizer, self._placeholders, formats=formats)
        except TemplateError as error:
            reason = f"is not a template of Jinja: {error.message or type(error).__name__}"
            raise schema.InvalidRequestError(reason, field="chat_template") from error

    def _placeholder(self, modality: str, update: PromptUpdate) -> Placeholder:
        # With an insertion, items have no placeholder in the text.
        if not isinstance(update, PromptReplacement):
            return Placeholder()
        text = update.target.join(self._family.modalities[modality].marks)
        return Placeholder(text, needed=update.target if update.otherwise is None else "")

    def _plain_text(self, prompt: schema.TextPrompt | schema.InterleavedPrompt, *, has_items: bool) -> str:
        """Returns the text with a placeholder for each picture."""
        if isinstance(prompt, schema.InterleavedPrompt):
            picture = self._placeholders.get("image", Placeholder()).text
            return "".join(picture if part is None else part for part in prompt.parts)
        typed = self._family.typed_placeholder
        return prompt.text.replace(typed, self._placeholders["image"].needed) if has_items and typed else prompt.text

    def _extent(
        self, ids: TokenIds, placeholder: schema.PlaceholderRange, item: tuple[str, schema.ItemExpansion]
    ) -> Extent:
        modality, expansion = item
        start = placeholder.offset - expansion.features.offset
        end = start + len(expansion.token_ids)
        before, after = self._family.modalities[modality].marks
        num_before = self._num_marked(before, ids[:start], at_end=True)
        return Extent(start - num_before, end + self._num_marked(after, ids[end:]))

    def _num_marked(self, mark: str, ids: TokenIds, *, at_end: bool = False) -> int:
        """Returns the number of ids that hold the mark at the start of `ids`, or at the end if `at_end`; 0 without the
        mark.

        A mark of plain text merges with adjacent text: its outermost token may hold a piece of that."""
        mark = mark.strip()
        for count in range(1, min(len(ids), len(mark.encode()) + 1) + 1 if mark else 1):
            text = self._tokenizer.decode(ids[-count:] if at_end else ids[:count]).strip()
            if text.endswith(mark) if at_end else text.startswith(mark):
                return count
        return 0

    def _checked_ids(self, ids: Sequence[int], *, is_cut: bool) -> TokenIds:
        if len(ids) >= self._max_model_len * (_MAX_CUT_CONTEXTS if is_cut else 1):
            raise self._no_room(len(ids))
        try:
            array = np.asarray(ids if len(ids) else np.empty(0, np.int32))
        except (ValueError, TypeError):  # lists of different lengths
            array = np.empty((0, 0))
        is_whole = array.ndim == 1 and array.dtype.kind in "iu"
        if not is_whole or array.min(initial=0) < 0 or array.max(initial=0) >= self._vocab_size:
            reason = f"token ids must be whole numbers from 0 to {self._vocab_size - 1}"
            raise schema.InvalidRequestError(reason, field="prompt", code="invalid_token_id")
        return array.astype(np.int32)

    def _rewritten(self, text: str) -> str:
        rewrite = self._family.rewrite_text
        return text if rewrite is None else rewrite(self._processor, text)

    def _rewritten_ids(self, ids: TokenIds, add_special_tokens: bool) -> TokenIds:
        """Returns the ids of the rewritten text, or the client's own ids if the text stays the same."""
        if self._family.rewrite_text is None:
            return ids
        text = self._tokenizer.decode(self._tokenizer.without_special_tokens(ids))
        rewritten = self._rewritten(text)
        return ids if rewritten == text else self._tokenizer.encode(rewritten, add_special_tokens=add_special_tokens)

    def _expand(
        self, prompt: schema.Prompt, items: Sequence[schema.ItemInfo], *, is_cut: bool
    ) -> tuple[TokenIds, list[schema.PlaceholderRange]]:
        self._check_items(items)
        pairs = self._numbered(items)
        adds_special_tokens = self._add_special_tokens and (self._family.keeps_special_tokens or not items)
        ids = self._ids(prompt, add_special_tokens=adds_special_tokens, has_items=bool(items), is_cut=is_cut)
        may_be_expanded = isinstance(prompt, schema.TokensPrompt)
        final, placeholders = apply_updates(ids, pairs, self._rules, self._tokenizer, may_be_expanded=may_be_expanded)
        num_positions = sum(int((final == embed_id).sum()) for embed_id in self._embed_ids)
        num_embeds = sum(item.num_embeds for item in items)
        if num_positions != num_embeds:
            reason = f"the prompt has {num_positions} positions for embeddings, its media fill {num_embeds}"
            raise schema.InvalidRequestError(reason, field="prompt", code="placeholder_mismatch")
        return final, placeholders

    def _numbered(self, items: Sequence[schema.ItemInfo]) -> list[tuple[str, schema.ItemExpansion]]:
        """Returns each item's modality and expansion, with the control tokens of its number in front."""
        numbers: Counter[str] = Counter()
        pairs = []
        for item in items:
            text = self._family.modalities[item.modality].ordinal(self._processor, numbers[item.modality])
            pairs.append((item.modality, _behind(self._tokenizer.content(text)[1], item.expansion)))
            numbers[item.modality] += 1
        return pairs

    def _check_items(self, items: Sequence[schema.ItemInfo]) -> None:
        """Raises InvalidRequestError for more items than the model's limit, or for none if the model needs some."""
        modalities = self._family.modalities
        if self._family.requires_items and not items:
            reason = f"this model takes no text alone, send media ({', '.join(modalities)}) with it"
            raise schema.InvalidRequestError(reason, field="prompt", code="media_required")
        for name, number in Counter(item.modality for item in items).items():
            limit = modalities[name].max_items
            if limit is not None and number > limit:
                reason = f"{number} {name} items in one prompt, this model takes {limit}"
                raise schema.InvalidRequestError(reason, field="prompt", code="too_many_items")

    def _no_room(self, num_tokens: int) -> schema.InvalidRequestError:
        context = f"the context of {self._max_model_len} tokens leaves no room for an answer"
        reason = f"the prompt has {num_tokens} tokens, {context}"
        return schema.InvalidRequestError(reason, field="prompt", code="context_length_exceeded")

    def _check_length(self, num_chars: int, *, is_cut: bool) -> None:
        """Raises InvalidRequestError for a text that exceeds the context in any tokenisation, before tokenising it."""
        if num_chars > self._max_model_len * self._longest_token * (_MAX_CUT_CONTEXTS if is_cut else 1):
            reason = (
                f"{num_chars} characters of text are more than the context of {self._max_model_len} tokens can hold"
            )
            raise schema.InvalidRequestError(reason, field="messages", code="context_length_exceeded")


def _of_prompt(error: schema.InvalidRequestError, prompt: schema.Prompt) -> schema.InvalidRequestError:
    """Returns the error with the client's name of the prompt as its field, unless it concerns another field."""
    if error.field.partition(".")[0] in ("tools", "chat_template", "chat_template_kwargs", "continue_final_message"):
        return error
    names = {schema.ChatPrompt: "messages", schema.PooledPrompt: "input"}
    return error.for_field(names.get(type(prompt), "prompt"))


def _behind(ids: TokenIds, expansion: schema.ItemExpansion) -> schema.ItemExpansion:
    if not len(ids):
        return expansion
    features = replace(expansion.features, offset=expansion.features.offset + len(ids))
    return replace(expansion, token_ids=np.concatenate((ids, expansion.token_ids)), features=features)
