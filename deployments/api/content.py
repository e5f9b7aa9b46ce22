"""Parts of a message's content: text, and media in every form that clients send them."""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, Self

from pydantic import BeforeValidator, Field, model_validator

from raylens.deployments.api.wire import Accepted, Name, Url, WireModel
from raylens.deployments.pipeline.media_source import MediaSource, upload_url


class Part(WireModel):
    """One part of a message's content. `cache_control` and `prompt_cache_breakpoint` are hints for providers that cache
    prompts in parts; this server ignores them."""

    type: str
    cache_control: Accepted = None
    prompt_cache_breakpoint: Accepted = None


class TextPart(Part):
    type: Literal["text"]
    text: str
    annotations: Accepted = None


class RefusalPart(Part):
    """A part in which an assistant declined to answer. It is text of the assistant's message like any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Detail = Literal["auto", "low", "high", "original"]
"""A hint that the server ignores."""


class ImageUrl(WireModel):
    """A `data:` or `http(s):` URL, or a `file:` URL if the server has a folder for files."""

    url: Url
    detail: Detail | None = None


class VideoUrl(WireModel):
    url: Url


def _object_of(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


AnyImageUrl = Annotated[ImageUrl, BeforeValidator(_object_of, json_schema_input_type=ImageUrl | str)]
AnyVideoUrl = Annotated[VideoUrl, BeforeValidator(_object_of, json_schema_input_type=VideoUrl | str)]
"""A URL as an object, or as a plain text."""


class MediaPart(Part):
    """A picture or a video. `uuid` is the client's own name for the item. Once an item was sent with its name, later
    requests may send the name alone, for as long as the server keeps the item."""

    uuid: Name | None = None

    @property
    def modality(self) -> str:
        return "image"

    @property
    def url(self) -> str | None:
        """The URL of the content, or None if the part has only a name."""
        raise NotImplementedError

    def source(self, field: str) -> MediaSource:
        """Returns the part's media. `field`: the client's name for this part."""
        return MediaSource(self.url, field, modality=self.modality, uuid=self.uuid)

    @model_validator(mode="after")
    def _is_content_or_name(self) -> Self:
        if self.url is None and self.uuid is None:
            raise ValueError("needs its content, a uuid or both")
        return self


class ImagePart(MediaPart):
    type: Literal["image_url"]
    image_url: AnyImageUrl | None = None

    @property
    def url(self) -> str | None:
        return None if self.image_url is None else self.image_url.url


class VideoPart(MediaPart):
    type: Literal["video_url"]
    video_url: AnyVideoUrl | None = None

    @property
    def modality(self) -> str:
        return "video"

    @property
    def url(self) -> str | None:
        return None if self.video_url is None else self.video_url.url


class InputImagePart(MediaPart):
    """A picture in the Responses API: a URL, or a file that was uploaded before."""

    type: Literal["input_image"]
    image_url: AnyImageUrl | None = None
    file_id: Name | None = None
    detail: Detail | None = None

    @property
    def url(self) -> str | None:
        if self.file_id is not None:
            return upload_url(self.file_id)
        return None if self.image_url is None else self.image_url.url

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if self.image_url is not None and self.file_id is not None:
            raise ValueError("image_url and file_id cannot both be set")
        return self


class ImageEmbedsPart(MediaPart):
    """A picture that the client has processed or encoded itself, as a safetensors file in base64."""

    type: Literal["image_embeds"]
    image_embeds: str | None = None

    @property
    def url(self) -> str | None:
        return None if self.image_embeds is None else f"data:;base64,{self.image_embeds}"

    def source(self, field: str) -> MediaSource:
        return MediaSource(self.url, field, is_precomputed=True, uuid=self.uuid)


def type_by_field(**types: str) -> BeforeValidator:
    """Adds the type to a part without one. `types`: the type that each field implies."""

    def with_type(part: object) -> object:
        if not isinstance(part, dict) or part.get("type") is not None:
            return part
        found = [kind for field, kind in types.items() if part.get(field) is not None]
        return {**part, "type": found[0]} if len(found) == 1 else part

    return BeforeValidator(with_type)


ContentPart = Annotated[
    TextPart | RefusalPart | ImagePart | VideoPart | InputImagePart | ImageEmbedsPart,
    Field(discriminator="type"),
    type_by_field(
        text="text",
        refusal="refusal",
        image_url="image_url",
        video_url="video_url",
        file_id="input_image",
        image_embeds="image_embeds",
    ),
]


class SaysText(Protocol):
    """A part with text, in any of the APIs."""

    @property
    def text(self) -> str: ...


def template_content(content: str | Sequence[SaysText | MediaPart]) -> str | list[dict[str, str]]:
    """Returns the content in the form of `raylens.preprocess.schema.Message`. Media become parts without their data."""
    if isinstance(content, str):
        return content
    return [
        {"type": part.modality} if isinstance(part, MediaPart) else {"type": "text", "text": part.text}
        for part in content
    ]


def media_of(content: str | Sequence[SaysText | MediaPart], field: str) -> list[MediaSource]:
    """Returns the media of one message's content, in order. `field`: the client's name for the content."""
    parts = [] if isinstance(content, str) else content
    found = [(index, part) for index, part in enumerate(parts) if isinstance(part, MediaPart)]
    return [part.source(f"{field}[{index}].{part.type}") for index, part in found]
