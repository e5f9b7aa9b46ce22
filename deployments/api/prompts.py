"""Prompts as a text, possibly with pictures in it, or as token ids. Media may come beside either."""

import re
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from raylens.deployments.api.content import Url
from raylens.deployments.api.wire import Name, WireModel, at_most
from raylens.deployments.pipeline.media_source import MediaSource
from raylens.preprocess.schema import InterleavedPrompt, InvalidRequestError, Prompt, TextPrompt, TokensPrompt

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
PlainPrompt = str | TokenIds


def _form(value: object) -> str:
    """Chooses the form of a prompt by its first element, so that an error is about the form that the client meant.
    These names must differ from field names: see `deployments/endpoint/errors.py`."""
    if not isinstance(value, list):
        return "a text"
    first = value[0] if value else 0
    if isinstance(first, str):
        return "several texts"
    return "lists of ids" if isinstance(first, list) else "token ids"


_Several = Field(min_length=1, max_length=64, fail_fast=True)
Prompts = Annotated[
    Annotated[str, Tag("a text")]
    | Annotated[TokenIds, Tag("token ids")]
    | Annotated[list[str], _Several, Tag("several texts")]
    | Annotated[list[TokenIds], _Several, Tag("lists of ids")],
    Discriminator(_form),
]
"""One prompt or several, each a text or token ids."""

_PICTURE = re.compile(r'<img src="(data:image/(?:jpeg|png|webp|gif);base64,[A-Za-z0-9+/=_-]+)">')
"""text-generation-webui's form of a picture in a prompt. It always sends JPEGs."""


class MediaItem(WireModel):
    url: Url | None = None
    uuid: Name | None = None


Modality = Literal["image", "video", "audio"]
MediaItems = Url | MediaItem | Annotated[list[Url | MediaItem], Field(max_length=1024, fail_fast=True)]


class PromptMedia(WireModel):
    multi_modal_data: Annotated[dict[Modality, MediaItems], at_most(3)] | None = Field(
        None, description="media for the placeholders in the prompt, by modality: URLs, or objects with url and uuid"
    )


def split_pictures(text: str) -> tuple[list[str | None], list[str]]:
    """Splits a text at each `<img src="data:image/...;base64,...">`. Returns the parts, with None in place of each
    picture, and the pictures' URLs. Takes time linear in the text's length."""
    pieces = _PICTURE.split(text)  # texts and URLs in turn
    parts = [None if index % 2 else piece for index, piece in enumerate(pieces) if index % 2 or piece]
    return parts, pieces[1::2]


def prompt_and_media(
    prompt: str | list[int], beside: dict[Modality, MediaItems] | None, field: str
) -> tuple[Prompt, list[MediaSource]]:
    """Returns the prompt and its media, from the text or `beside`. Raises InvalidRequestError for media in both."""
    if isinstance(prompt, str):
        parts, urls = split_pictures(prompt)
        if urls and beside:
            reason = f"{len(urls)} pictures in the text of a prompt that has multi_modal_data, too"
            raise InvalidRequestError(reason, field=field)
        if urls:
            return InterleavedPrompt(parts), [MediaSource(url, field) for url in urls]
    media = [
        _source(item, modality, f"multi_modal_data.{modality}[{index}]")
        for modality, items in (beside or {}).items()
        for index, item in enumerate(items if isinstance(items, list) else [items])
    ]
    return (TextPrompt(prompt) if isinstance(prompt, str) else TokensPrompt(prompt)), media


def _source(item: str | MediaItem, modality: str, field: str) -> MediaSource:
    if isinstance(item, str):
        return MediaSource(item, field, modality=modality)
    if item.url is None and item.uuid is None:
        raise InvalidRequestError("needs url, uuid or both", field=field)
    return MediaSource(item.url, field, modality=modality, uuid=item.uuid)
