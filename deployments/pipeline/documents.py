"""Replaces documents in prompts by pictures of their pages."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raylens.deployments.pipeline.media_source import MediaSource
from raylens.preprocess.data_url import data_url
from raylens.preprocess.schema import ChatPrompt, PooledPrompt, Prompt

DOCUMENT = "document"
"""The modality of a part whose pages are pictures."""

Parts = list[dict[str, Any]]


@dataclass(slots=True)
class PageBudget:
    """The pages of one client's request, all its documents together. `on_fetched`: gets the bytes of each document."""

    num_left: int
    on_fetched: Callable[[int], None]


async def with_pages(
    prompt: Prompt, media: Sequence[MediaSource], pages_of: Callable[[MediaSource], Awaitable[list[bytes]]]
) -> tuple[Prompt, list[MediaSource]]:
    """Returns the prompt and its media with each document's pages in its place. `pages_of` returns them as pictures."""
    opened_media: list[MediaSource] = []
    counts: list[int | None] = []
    for source in media:
        if source.modality != DOCUMENT:
            counts.append(None)
            opened_media.append(source)
            continue
        pages = await pages_of(source)
        counts.append(len(pages))
        opened_media += [replace(source, url=data_url(page), modality="image", uuid=None) for page in pages]
    numbers = iter(counts)

    def opened(parts: Parts) -> Parts:
        found: Parts = []
        for part in parts:
            number = None if part["type"] == "text" else next(numbers)
            found += [part] if number is None else [{"type": "image"}] * number
        return found

    if isinstance(prompt, PooledPrompt):
        query = None if prompt.query is None else opened(prompt.query)
        return replace(prompt, query=query, content=opened(prompt.content)), opened_media
    assert isinstance(prompt, ChatPrompt), "only these have parts"
    messages = [
        {**message, "content": opened(message["content"])} if isinstance(message.get("content"), list) else message
        for message in prompt.messages
    ]
    return replace(prompt, messages=messages), opened_media
