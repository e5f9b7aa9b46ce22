"""Removes all pictures of a prompt but the last, as text-generation-webui does by default."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raylens.deployments.pipeline.media_source import MediaSource
from raylens.preprocess.schema import ChatPrompt, InterleavedPrompt, Prompt, parts_of


def with_last_picture(prompt: Prompt, media: Sequence[MediaSource]) -> tuple[Prompt, list[MediaSource]]:
    """Returns the prompt and its media without any picture but the last one.

    This applies to conversations and to texts with pictures in them. Pictures beside a prompt stay, because the client
    has counted their placeholders."""
    pictures = [source for source in media if source.modality == "image"]
    if len(pictures) < 2:
        return prompt, list(media)
    if isinstance(prompt, ChatPrompt):
        shorter: Prompt = _last_in_conversation(prompt)
    elif isinstance(prompt, InterleavedPrompt):
        last = max(index for index, part in enumerate(prompt.parts) if part is None)
        parts = enumerate(prompt.parts)
        shorter = InterleavedPrompt([part for index, part in parts if part is not None or index == last])
    else:
        return prompt, list(media)
    return shorter, [source for source in media if source.modality != "image" or source is pictures[-1]]


def _last_in_conversation(prompt: ChatPrompt) -> ChatPrompt:
    left = sum(_is_picture(part) for message in prompt.messages for part in parts_of(message)) - 1
    messages = []
    for message in prompt.messages:
        parts = []
        for part in parts_of(message):
            if not _is_picture(part) or left == 0:
                parts.append(part)
            left -= _is_picture(part)
        messages.append({**message, "content": parts} if isinstance(message.get("content"), list) else message)
    return replace(prompt, messages=messages)


def _is_picture(part: dict[str, Any]) -> bool:
    return bool(part["type"] == "image")
