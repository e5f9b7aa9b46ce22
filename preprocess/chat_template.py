"""The model's chat template: renders conversations as text, and shows the forms of tool calls and of thoughts."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import (
    _CONTROL_TOKEN_START,
    _get_control_token_patterns,
    _get_template_variables,
    mark_control_tokens,
)

from raylens.preprocess import thought_formats
from raylens.preprocess.message_contents import MessageContents, Placeholder, probe_contents, writes_pairs
from raylens.preprocess.models.family import HFProcessor
from raylens.preprocess.schema import (
    ChatPrompt,
    ChatTemplateError,
    InvalidRequestError,
    Message,
)
from raylens.preprocess.template_bounds import bound_templates
from raylens.preprocess.thought_formats import find_thought_format
from raylens.preprocess.time_limit import TimeLimit, TimeLimitError
from raylens.preprocess.tool_calls.detection import detect_format
from raylens.preprocess.tool_calls.formats import ToolCallFormat

logger = logging.getLogger(f"ray.serve.{__name__}")

_RESERVED_VARIABLES = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "return_assistant_tokens_mask", "return_tensors", "return_dict"}
    | {"load_audio_from_video", "processor_kwargs", "sanitize_control_tokens"}
)
"""Template variables that the server or transformers sets, so that a client may not."""

_MAX_CONTROL_TOKEN_CHARS = 64
"""A control token of more characters may be put together of parts."""

MAX_SECONDS = 5.0
"""The CPU time for one prompt. An ordinary template renders ten thousand messages in less than a tenth of this."""


@dataclass(frozen=True, slots=True)
class ChatFormats:
    """What replaces the checkpoint's own; None: nothing does.

    `template`: of Jinja. `tool_call_parser`, `reasoning_parser`: name the formats of tool calls and of thoughts.
    `takes_templates`: whether a request may bring a template of its own."""

    template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    takes_templates: bool = False


OWN_FORMATS = ChatFormats()


class ChatTemplate:
    """The chat template of one model, if the model has one, or a request's own."""

    def __init__(
        self,
        processor: HFProcessor,
        hf_tokenizer: Any,
        placeholders: Mapping[str, Placeholder] | None = None,
        *,
        otherwise: str | None = None,
        formats: ChatFormats = OWN_FORMATS,
    ) -> None:
        """`placeholders`: of each modality of the model. `otherwise`: the template for a model without one."""
        self._processor = processor
        self._template = formats.template or processor.chat_template or hf_tokenizer.chat_template or otherwise
        self.tool_calls: ToolCallFormat | None = None
        self.takes_pairs = False
        self._has_text_arguments = False
        response_template = getattr(hf_tokenizer, "response_template", None)
        self.thoughts = (
            find_thought_format(self._template, response_template)
            if formats.reasoning_parser is None
            else thought_formats.FORMATS[formats.reasoning_parser]
        )
        self._time_limit = TimeLimit(MAX_SECONDS)
        bound_templates()
        if isinstance(self._template, str):
            self._variables = _get_template_variables(self._template)
            self._reserved = _RESERVED_VARIABLES | hf_tokenizer.special_tokens_map.keys()
            self._control_tokens, _ = _get_control_token_patterns(hf_tokenizer._get_control_tokens(self._template))
            self._contents = self._probed_contents(placeholders or {})
            # A template that writes messages of any role is not made for pairs.
            if "query" in self._template:
                self.takes_pairs = writes_pairs(self._rendered_probe, self._contents)
            if "tools" in self._variables:
                self.tool_calls, self._has_text_arguments = self._detected_calls(hf_tokenizer, formats)

    def fill(self, prompt: ChatPrompt) -> str:
        """Returns the conversation as text. Control tokens and placeholders typed by a user are marked in it, so that
        they are tokenised as ordinary text. Raises InvalidRequestError if the model has no template, or its template
        rejects the conversation, the tools or the variables, and ChatTemplateError if the template exceeds its bounds
        of time and size."""
        if not isinstance(self._template, str):
            raise InvalidRequestError("this model has no chat template", field="messages", code="no_chat_template")
        if prompt.tools and self.tool_calls is None:
            raise InvalidRequestError("this model's chat template has no tools, or none in a known form", field="tools")
        variables = self._client_variables(prompt)
        try:
            return self._render(
                self._formed(_marked(prompt.messages, self._control_tokens)),
                tools=_marked(prompt.tools, self._control_tokens) or None,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                **variables,
            )
        except (TemplateError, TypeError) as error:  # the template rejects the conversation
            reason = "the model's chat template does not accept these roles or contents"
            raise InvalidRequestError(reason, field="messages") from error
        except ValueError as error:
            if not prompt.continue_final_message:
                raise
            reason = "the model's chat template cannot end with the text of the last message"
            raise InvalidRequestError(reason, field="continue_final_message") from error

    def _formed(self, messages: list[Message]) -> list[Message]:
        """Returns the messages with contents and the arguments of calls in the template's form."""
        formed = self._contents.formed(messages)
        return [*map(_with_text_arguments, formed)] if self._has_text_arguments else formed

    def _render(self, messages: list[Message], **options: Any) -> str:
        options |= {"chat_template": self._template, "tokenize": False}
        try:
            text: str = self._time_limit.run(lambda: self._processor.apply_chat_template(messages, **options))
        except TimeLimitError:
            excess = f"takes more than {self._time_limit.seconds:g} s for this conversation"
            raise ChatTemplateError(f"the model's chat template {excess}") from None
        # Unbounded loops, products or recursion.
        except (OverflowError, RecursionError, MemoryError) as error:
            excess = "counts too far, calls itself too often or makes too large a value"
            raise ChatTemplateError(f"the model's chat template {excess}") from error
        return text

    def _probed_contents(self, placeholders: Mapping[str, Placeholder]) -> MessageContents:
        try:
            return probe_contents(self._rendered_probe, placeholders)
        except ChatTemplateError as error:
            logger.warning("chats will fail: %s", error)
            return MessageContents(placeholders)

    def _detected_calls(self, hf_tokenizer: Any, formats: ChatFormats) -> tuple[ToolCallFormat | None, bool]:
        def render(messages: list[Message]) -> str:
            return self._rendered_probe(self._contents.formed(messages))

        try:
            return detect_format(render, hf_tokenizer, formats.tool_call_parser)
        except ChatTemplateError as error:
            logger.warning("tools are refused: %s", error)
            return None, False

    def _rendered_probe(self, messages: list[Message]) -> str:
        try:
            return self._render(messages, add_generation_prompt=True)
        except ChatTemplateError:
            raise
        except Exception:  # a template may raise anything for a content in the wrong form
            return ""

    def _client_variables(self, prompt: ChatPrompt) -> dict[str, Any]:
        """Returns the client's variables that the template reads, marked. Raises InvalidRequestError for reserved
        names."""
        for name in prompt.template_kwargs:
            if name in self._reserved:
                raise InvalidRequestError("is set by the server itself", field=f"chat_template_kwargs.{name}")
        read = {name: value for name, value in prompt.template_kwargs.items() if name in self._variables}
        marked: dict[str, Any] = _marked(read, self._control_tokens)
        return marked


def _marked(value: Any, control_tokens: re.Pattern[str]) -> Any:
    """Returns `value` with the control tokens in every string marked. This includes field names, which the client
    chooses in a tool's schema and a call's arguments, and which transformers' own marking leaves out."""
    if isinstance(value, dict):
        return {_marked(key, control_tokens): _marked(inner, control_tokens) for key, inner in value.items()}
    if isinstance(value, list):
        return _parted([_marked(inner, control_tokens) for inner in value], control_tokens)
    return mark_control_tokens(value, control_tokens)


def _parted(values: list[Any], control_tokens: re.Pattern[str]) -> list[Any]:
    """Returns the values with a mark between text parts that would make up a control token if a template joined them.
    transformers' tokenization drops a lone mark, but joins nothing over it."""
    following = ""
    for index in reversed(range(len(values))):
        match values[index]:
            case {"type": "text", "text": str(text)}:
                if following and _joins(text, following, control_tokens):
                    values[index] = {**values[index], "text": text + _CONTROL_TOKEN_START}
                following = (text[:_MAX_CONTROL_TOKEN_CHARS] + following)[:_MAX_CONTROL_TOKEN_CHARS]
            case _:
                following = ""
    return values


def _joins(text: str, following: str, control_tokens: re.Pattern[str]) -> bool:
    """Returns whether a control token begins in the text and ends in the following one."""
    before = text[-_MAX_CONTROL_TOKEN_CHARS:]
    both, at = before + following, 0
    while found := control_tokens.search(both, at):
        if found.start() < len(before) < found.end():
            return True
        at = found.start() + 1
    return False


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
        for call in message["tool_calls"]
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls}
