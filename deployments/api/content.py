"""Parts of a message's content: text, and media in every form that clients send them."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import BeforeValidator, Field, StringConstraints, field_serializer, model_validator

from raylens.deployments.api.wire import Accepted, Name, WireModel
from raylens.deployments.pipeline.media_source import MediaSource, upload_url
from raylens.preprocess.data_url import is_data_url

Url = Annotated[str, StringConstraints(strip_whitespace=True)]


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


class InputText(Part):
    """A part of text. `output_text` is a part of an earlier answer; the server's additions to it are ignored."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Accepted = None
    logprobs: Accepted = None


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


class AudioUrl(WireModel):
    url: Url


class InputAudio(WireModel):
    """A sound in base64. `format` is a hint that the server ignores: the bytes show the format."""

    data: Url
    format: str | None = None


def _object_of(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


AnyImageUrl = Annotated[ImageUrl, BeforeValidator(_object_of, json_schema_input_type=ImageUrl | str)]
AnyVideoUrl = Annotated[VideoUrl, BeforeValidator(_object_of, json_schema_input_type=VideoUrl | str)]
AnyAudioUrl = Annotated[AudioUrl, BeforeValidator(_object_of, json_schema_input_type=AudioUrl | str)]
"""A URL as an object, or as a plain text."""


class MediaPart(Part):
    """A picture, a video or a sound. `uuid` is the client's own name for the item. Once an item was sent with its name,
    later requests may send the name alone, for as long as the server keeps the item."""

    modality: ClassVar[str] = "image"
    is_precomputed: ClassVar[bool] = False
    uuid: Name | None = None

    @property
    def url(self) -> str | None:
        """The URL of the content, or None if the part has only a name."""
        raise NotImplementedError

    def source(self, field: str) -> MediaSource:
        """Returns the part's media. `field`: the client's name for this part."""
        return MediaSource(self.url, field, self.modality, self.is_precomputed, self.uuid)

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
    modality = "video"
    type: Literal["video_url"]
    video_url: AnyVideoUrl | None = None

    @property
    def url(self) -> str | None:
        return None if self.video_url is None else self.video_url.url


class AudioPart(MediaPart):
    modality = "audio"
    type: Literal["audio_url"]
    audio_url: AnyAudioUrl | None = None

    @property
    def url(self) -> str | None:
        return None if self.audio_url is None else self.audio_url.url


class InputAudioPart(MediaPart):
    """A sound in OpenAI's form."""

    modality = "audio"
    type: Literal["input_audio"]
    input_audio: InputAudio | None = None

    @property
    def url(self) -> str | None:
        return None if self.input_audio is None else f"data:;base64,{self.input_audio.data}"


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

    @field_serializer("image_url")
    def _as_text(self, value: ImageUrl | None) -> str | None:
        """As OpenAI's API tells it."""
        return None if value is None else value.url

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if self.image_url is not None and self.file_id is not None:
            raise ValueError("image_url and file_id cannot both be set")
        return self


class DocumentFile(WireModel):
    file_data: Url | None = None
    file_id: Name | None = None
    filename: Accepted = None


class FilePart(MediaPart):
    """A PDF in chat completions, whose pages are pictures."""

    modality = "document"
    type: Literal["file"]
    file: DocumentFile

    @property
    def url(self) -> str | None:
        return _document_url(self.file.file_data, self.file.file_id)


class InputFilePart(MediaPart):
    """The same in the Responses API, which also takes a URL."""

    modality = "document"
    type: Literal["input_file"]
    file_data: Url | None = None
    file_id: Name | None = None
    file_url: Url | None = None
    filename: Accepted = None
    detail: Accepted = None

    @property
    def url(self) -> str | None:
        return self.file_url or _document_url(self.file_data, self.file_id)


def _document_url(data: str | None, file_id: str | None) -> str | None:
    if data is not None:
        return data if is_data_url(data) else f"data:;base64,{data}"
    return None if file_id is None else upload_url(file_id)


class ImageEmbedsPart(MediaPart):
    """A picture that the client has processed or encoded itself, as a safetensors file in base64."""

    is_precomputed = True
    type: Literal["image_embeds"]
    image_embeds: str | None = None

    @property
    def url(self) -> str | None:
        return None if self.image_embeds is None else f"data:;base64,{self.image_embeds}"


def type_by_field(*same: str, **types: str) -> BeforeValidator:
    """Adds the type to a part without one. `types`: by the field that implies it. `same`: fields named like it."""
    types |= {field: field for field in same}

    def with_type(part: object) -> object:
        if not isinstance(part, dict) or part.get("type") is not None:
            return part
        found = [kind for field, kind in types.items() if part.get(field) is not None]
        return {**part, "type": found[0]} if len(found) == 1 else part

    return BeforeValidator(with_type)


_TYPED_BY_FIELD = ("text", "refusal", "image_url", "video_url", "audio_url", "input_audio", "image_embeds", "file")
ContentPart = Annotated[
    TextPart
    | RefusalPart
    | ImagePart
    | VideoPart
    | AudioPart
    | InputAudioPart
    | InputImagePart
    | FilePart
    | ImageEmbedsPart,
    Field(discriminator="type"),
    type_by_field(*_TYPED_BY_FIELD, file_id="input_image"),
]
InputPart = Annotated[
    InputText | RefusalPart | InputImagePart | InputAudioPart | InputFilePart,
    Field(discriminator="type"),
    type_by_field("refusal", "input_audio", text="input_text", image_url="input_image", file_id="input_image"),
]
InputContent = str | Annotated[list[InputPart], Field(max_length=10_000, fail_fast=True)]


class SaidPart(Protocol):
    """A part that chat templates get as text."""

    @property
    def text(self) -> str: ...


Content = str | Sequence[SaidPart | MediaPart]
"""The content of a message, in any of the APIs."""


def template_content(content: Content) -> str | list[dict[str, str]]:
    """Returns the content in the form of `raylens.preprocess.schema.Message`. Media become parts without their data."""
    if isinstance(content, str):
        return content
    return [
        {"type": part.modality} if isinstance(part, MediaPart) else {"type": "text", "text": part.text}
        for part in content
    ]
