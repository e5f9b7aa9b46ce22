"""The model's chat template: turns conversations into text, and tells how the model writes tool calls."""

import re
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import (
    _get_control_token_patterns,
    _get_template_variables,
    mark_control_tokens,
)

from preprocess.models.family import HFProcessor
from preprocess.schema import ChatPrompt, InvalidRequestError, ToolCallFormat

_RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "tokenize",
        "return_tensors",
        "return_dict",
        "load_audio_from_video",
        "processor_kwargs",
        "sanitize_control_tokens",
    }
)
"""What a client's variables of a template may not be called: what the server or transformers itself sets."""


class ChatTemplate:
    """Of one model, which may have none. Clients cannot bring their own."""

    def __init__(self, processor: HFProcessor, hf_tokenizer: Any) -> None:
        self._processor = processor
        self._template = processor.chat_template or hf_tokenizer.chat_template
        self.tool_calls = tool_call_format(self._template)
        if isinstance(self._template, str):
            self._variables = _get_template_variables(self._template)
            self._reserved = _RESERVED_VARIABLES | hf_tokenizer.special_tokens_map.keys()
            self._control_tokens, _ = _get_control_token_patterns(hf_tokenizer._get_control_tokens(self._template))

    def fill(self, prompt: ChatPrompt) -> str:
        """The conversation's text. Control tokens and placeholders that a user typed come out marked, to be tokenised
        as ordinary text. Raises InvalidRequestError for one that the template does not take."""
        if not isinstance(self._template, str):
            raise InvalidRequestError("this model has no chat template", field="messages", code="no_chat_template")
        if prompt.tools and self.tool_calls is None:
            raise InvalidRequestError("this model's chat template has no tools, or none in a known form", field="tools")
        variables = self._client_variables(prompt)
        try:
            text: str = self._processor.apply_chat_template(
                _marked(prompt.messages, self._control_tokens),
                tools=_marked(prompt.tools, self._control_tokens) or None,
                chat_template=self._template,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                tokenize=False,
                **variables,
            )
        except (TemplateError, TypeError) as error:
            raise InvalidRequestError(
                "the model's chat template does not accept these roles or contents",
                field="messages",
            ) from error
        except ValueError as error:
            if not prompt.continue_final_message:
                raise
            reason = "the last message has no text with which the model's chat template lets it end"
            raise InvalidRequestError(reason, field="continue_final_message") from error
        return text

    def _client_variables(self, prompt: ChatPrompt) -> dict[str, Any]:
        """Those that the template reads. Raises InvalidRequestError for names that are not the client's to give."""
        for name in prompt.template_kwargs:
            if name in self._reserved:
                raise InvalidRequestError("is set by the server itself", field=f"chat_template_kwargs.{name}")
        read = {name: value for name, value in prompt.template_kwargs.items() if name in self._variables}
        marked: dict[str, Any] = _marked(read, self._control_tokens)
        return marked


def _marked(value: Any, control_tokens: re.Pattern[str]) -> Any:
    """Every string marked, names of fields among them: in a tool's schema and a call's arguments they are a client's,
    and transformers' own marking leaves them out."""
    if isinstance(value, dict):
        return {_marked(key, control_tokens): _marked(inner, control_tokens) for key, inner in value.items()}
    if isinstance(value, list):
        return [_marked(inner, control_tokens) for inner in value]
    return mark_control_tokens(value, control_tokens)


def tool_call_format(template: object) -> ToolCallFormat | None:
    """How the model of this chat template writes calls of tools; None where it has none, or in a form unknown here.

    Hermes' form is that of Qwen's and of most models built on theirs; their templates spell its tags out.
    """
    is_hermes = isinstance(template, str) and "tools" in template and "<tool_call>" in template
    return ToolCallFormat("<tool_call>\n", "\n</tool_call>") if is_hermes else None
