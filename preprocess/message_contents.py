"""Detects the form of message contents that a chat template expects, by rendering small conversations.

Some templates expect a text, some a list of parts, and some a list from users and a text from other roles. A template
does not declare its form. With the wrong form it fails, omits the content, or prints the list in Python's syntax."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import compress, product
from operator import not_
from typing import Any

from raylens.preprocess.schema import Message, parts_of

Render = Callable[[list[Message]], str]
"""Fills the template. Returns an empty text if the template rejects the messages."""

_SAID, _UNSEEN = "zqsaid", "zqunseen"
_TEXT_PART = {"type": "text", "text": _SAID, "unseen": _UNSEEN}
"""A template that reads the part writes its text alone; a template that prints the part writes both."""
_CALL_ID = "zqcall123"  # Mistral's templates require nine letters and digits
_ROLES = ("user", "system", "assistant", "tool")
_PAIR_ROLES = ("query", "document")
"""Of the two messages that a reranker's template writes."""
_USER: Message = {"role": "user", "content": "zquser"}
_ASSISTANT: Message = {"role": "assistant", "content": "zqassistant"}
_CALLER: Message = {
    "role": "assistant",
    "tool_calls": [{"id": _CALL_ID, "type": "function", "function": {"name": "zqname", "arguments": {}}}],
}


_QUERY: Message = {"role": "query", "content": "zqquery"}
_DOCUMENT: Message = {"role": "document", "content": "zqdocument"}


@dataclass(frozen=True, slots=True)
class Placeholder:
    """`text`: the item's text in a prompt. `needed`: the part of it that a prompt must contain. Both are empty for a
    model that inserts items without placeholders."""

    text: str = ""
    needed: str = ""


@dataclass(frozen=True, slots=True)
class MessageContents:
    """`placeholders`: of each modality of the model. `list_roles`: the roles whose content must be a list of parts.
    `written`: the roles and modalities whose placeholder the template writes. `needs_content`: an assistant's message
    with tool calls only gets an empty content. `takes_later_system`: the system may speak behind others, too."""

    placeholders: Mapping[str, Placeholder]
    list_roles: frozenset[str] = frozenset()
    written: frozenset[tuple[str, str]] = frozenset()
    needs_content: bool = False
    takes_later_system: bool = True

    def formed(self, messages: list[Message]) -> list[Message]:
        """Returns the messages with each content in the template's form.

        If the template writes a placeholder in users' messages only, media of other roles move into a user's message
        right behind. If it writes none, the placeholder becomes text on a line of its own. Later texts of the system
        move into its first message where the template takes no other."""
        if not self.takes_later_system and any(message["role"] == "system" for message in messages[1:]):
            messages = _with_one_system(messages)
        return [self._formed(message) for message in self._with_places(messages)]

    def _with_places(self, messages: list[Message]) -> list[Message]:
        placed, moved = list[Message](), list[dict[str, str]]()
        for message in messages:
            # Results of several tools stay together.
            if moved and message["role"] != "tool":
                if message["role"] == "user":
                    message = {**message, "content": [*moved, *parts_of(message)]}
                else:
                    placed.append({"role": "user", "content": moved})
                moved = []
            # Behind a moved item all others move, too: items are in the order of the request.
            has_place = [
                part["type"] == "text" or (not moved and self._has_place(message["role"], part))
                for part in parts_of(message)
            ]
            if not all(has_place):
                moved = [*moved, *compress(parts_of(message), map(not_, has_place))]
                message = {**message, "content": [*compress(parts_of(message), has_place)]}
            placed.append(message)
        return [*placed, {"role": "user", "content": moved}] if moved else placed

    def _has_place(self, role: str, part: dict[str, str]) -> bool:
        return ("user", part["type"]) not in self.written or (role, part["type"]) in self.written

    def _formed(self, message: Message) -> Message:
        if "content" not in message and not self.needs_content:
            return message
        parts = [self._with_placeholder(message["role"], part) for part in parts_of({"content": "", **message})]
        if message["role"] in self.list_roles or any(part["type"] != "text" for part in parts):
            return {**message, "content": parts}
        return {**message, "content": "".join(part["text"] for part in parts)}

    def _with_placeholder(self, role: str, part: dict[str, str]) -> dict[str, str]:
        placeholder = self.placeholders.get(part["type"])
        if placeholder is None or (role, part["type"]) in self.written:
            return part
        return {"type": "text", "text": placeholder.text and f"{placeholder.text}\n"}


def _with_one_system(messages: list[Message]) -> list[Message]:
    """Moves the texts of the system into one message at the beginning.

    Media of the system stay where they are, as a user's: items are in the order of the request. Messages of a user
    between which the system has spoken become one: many templates want users and assistants in turn."""
    said, others, is_behind_system = list[str](), list[Message](), False
    for message in messages:
        is_system = message["role"] == "system"
        if is_system:
            said.append("".join(part["text"] for part in parts_of(message) if part["type"] == "text"))
            message = {"role": "user", "content": [part for part in parts_of(message) if part["type"] != "text"]}
        if (is_system or is_behind_system) and others and message["role"] == others[-1]["role"] == "user":
            others[-1] = {**others[-1], "content": _joined(parts_of(others[-1]), parts_of(message))}
        elif not is_system or message["content"]:
            others.append(message)
        is_behind_system = is_system
    return [{"role": "system", "content": "\n\n".join(said)}, *others]


def _joined(one: list[dict[str, str]], other: list[dict[str, str]]) -> list[dict[str, str]]:
    are_texts = one and other and one[-1]["type"] == other[0]["type"] == "text"
    return [*one, *([{"type": "text", "text": "\n"}] if are_texts else []), *other]


def probe_contents(render: Render, placeholders: Mapping[str, Placeholder]) -> MessageContents:
    """Returns the forms that the template expects. A text stays a text if the template accepts both forms or none."""
    found = MessageContents(placeholders)
    for role in (*_ROLES, *_PAIR_ROLES):
        if not _is_said(render(_around(found, role, _SAID))) and _is_said(render(_around(found, role, [_TEXT_PART]))):
            found = replace(found, list_roles=found.list_roles | {role})
        if role == "system":
            found = replace(found, takes_later_system=_takes_later_system(render, found))
        if role == "assistant":
            found = replace(found, needs_content=not render(found.formed([_USER, _CALLER])))
    written = set()
    for role, (modality, placeholder) in product((*_ROLES, *_PAIR_ROLES), placeholders.items()):
        text = render(_around(found, role, [{"type": modality}, _TEXT_PART]))
        if _is_said(text) and placeholder.needed in text:
            written.add((role, modality))
    return replace(found, written=frozenset(written))


def _takes_later_system(render: Render, found: MessageContents) -> bool:
    """Returns whether the template writes what the system says both at the beginning and behind a user."""
    first, later = ({"role": "system", "content": said} for said in ("zqfirst", _SAID))
    said = [first, _USER, later]
    texts = [render(found.formed(messages)) for messages in (said, [*said, _ASSISTANT, _USER])]
    return all(one in text for text in texts for one in ("zqfirst", _SAID))


def writes_pairs(render: Render, contents: MessageContents) -> bool:
    """Returns whether the template writes the messages of a pair, a query and a document."""
    text = render(contents.formed([_QUERY, _DOCUMENT]))
    return all(str(message["content"]) in text for message in (_QUERY, _DOCUMENT))


def _around(found: MessageContents, role: str, content: Any) -> list[Message]:
    """Returns a conversation with `content` unchanged in the message of `role`. Other messages have the forms found so
    far."""
    before = {"assistant": [_USER], "tool": [_USER, _CALLER], "document": [_QUERY]}.get(role, [])
    after = {"system": [_USER], "assistant": [_USER], "query": [_DOCUMENT]}.get(role, [])
    message: Message = {"role": role, "content": content}
    if role == "tool":
        message["tool_call_id"] = _CALL_ID
    return [*found.formed(before), message, *found.formed(after)]


def _is_said(text: str) -> bool:
    return _SAID in text and _UNSEEN not in text
