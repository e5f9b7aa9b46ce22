"""Parts of a message's content: text, and media in every form that clients send them."""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, Self

from pydantic import Field, model_validator

from deployments.api.wire import Accepted, Name, WireModel
from deployments.pipeline.media_source import MediaSource, upload_url


class Part(WireModel):
    """`cache_control` and `prompt_cache_breakpoint` say where a provider may cut what it keeps."""

    type: str
    cache_control: Accepted = None
    prompt_cache_breakpoint: Accepted = None


class TextPart(Part):
    type: Literal["text"]
    text: str
    annotations: Accepted = None


class RefusalPart(Part):
    """What an assistant would not answer: text of its message like any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImageUrl(WireModel):
    """A data:, http(s): or, where the server has a folder for them, file: URL. `detail` is a hint that the server is
    free to ignore; it always looks closely."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class VideoUrl(WireModel):
    url: str


class MediaPart(Part):
    """`uuid` is the client's own name for the item: once sent with it, the name alone will do for as long as the server
    keeps the item."""

    uuid: Name | None = None

    @property
    def modality(self) -> str:
        return "image"

    @property
    def url(self) -> str | None:
        """Where its content is; None for one that is only named."""
        raise NotImplementedError

    def source(self, field: str) -> MediaSource:
        """`field`: the client's name for this part."""
        return MediaSource(self.url, field, modality=self.modality, uuid=self.uuid)

    @model_validator(mode="after")
    def _is_content_or_name(self) -> Self:
        if self.url is None and self.uuid is None:
            raise ValueError("needs its content, a uuid or both")
        return self


class ImagePart(MediaPart):
    type: Literal["image_url"]
    image_url: ImageUrl | None = None

    @property
    def url(self) -> str | None:
        return None if self.image_url is None else self.image_url.url


class VideoPart(MediaPart):
    type: Literal["video_url"]
    video_url: VideoUrl | None = None

    @property
    def modality(self) -> str:
        return "video"

    @property
    def url(self) -> str | None:
        return None if self.video_url is None else self.video_url.url


class InputImagePart(MediaPart):
    """A picture as the Responses API has it: a URL, or a file that was uploaded before."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: Name | None = None
    detail: Literal["auto", "low", "high"] | None = None

    @property
    def url(self) -> str | None:
        return self.image_url if self.file_id is None else upload_url(self.file_id)

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if self.image_url is not None and self.file_id is not None:
            raise ValueError("image_url and file_id cannot both be set")
        return self


class ImageEmbedsPart(MediaPart):
    """A picture that the client has processed or encoded itself: a safetensors file, in base64."""

    type: Literal["image_embeds"]
    image_embeds: str | None = None

    @property
    def url(self) -> str | None:
        return None if self.image_embeds is None else f"data:;base64,{self.image_embeds}"

    def source(self, field: str) -> MediaSource:
        return MediaSource(self.url, field, is_precomputed=True, uuid=self.uuid)


ContentPart = Annotated[
    TextPart | RefusalPart | ImagePart | VideoPart | InputImagePart | ImageEmbedsPart, Field(discriminator="type")
]


class SaysText(Protocol):
    """A part of text, of whichever API."""

    @property
    def text(self) -> str: ...


def template_content(content: str | Sequence[SaysText | MediaPart]) -> list[dict[str, str]]:
    """As chat templates take it; media become placeholders without their data."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [
        {"type": part.modality} if isinstance(part, MediaPart) else {"type": "text", "text": part.text}
        for part in content
    ]


def media_of(content: str | Sequence[SaysText | MediaPart], field: str) -> list[MediaSource]:
    """The media of one message's content, which the client calls `field`, in order."""
    parts = [] if isinstance(content, str) else content
    found = [(index, part) for index, part in enumerate(parts) if isinstance(part, MediaPart)]
    return [part.source(f"{field}[{index}].{part.type}") for index, part in found]
