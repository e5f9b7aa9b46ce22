"""Turns encoded pictures into RGB: checks limits before decoding, and decodes in one canonical way."""

import io
import warnings
from dataclasses import field
from typing import Annotated, Literal

from PIL import Image, ImageFile, ImageOps
from pydantic import ConfigDict, Field, NonNegativeInt
from pydantic.dataclasses import dataclass

from raylens.preprocess.image_metadata import check_metadata
from raylens.preprocess.schema import InvalidRequestError, invalid_media

# No TIFF: its tiles may be larger than the picture that they make up, and more than it needs.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "MPO")
_START_OF_SCAN = b"\xff\xda"
DEFAULT_VIDEO_FRAMES = 32
"""The most frames of a video where nobody names a number or a rate. transformers would take all frames, which are 1,500
for a minute of film. The families without a setting were trained with 8 to 32."""

MIN_SIDE = 4
"""Pixels of the shorter side of a picture or a video. A narrower one shows nothing."""
MAX_ASPECT_RATIO = 100
"""The longer side over the shorter one. Processors that scale the shorter side up make a huge picture of a narrow
one."""
MIN_AUDIO_SECONDS = 0.1
"""A shorter sound says nothing, and is no whole frame of a processor."""
MAX_SOURCE_FRAMES = 36_000
"""Frames that are decoded of a video: ten minutes at 60 a second."""
_GREY_STEPS = {"L;2": 85, "L;4": 17}  # the step from one shade to the next in 8 bits, for PNGs of 2 and 4 bits
_MAX_SCANS = 100  # progressive JPEGs have about ten


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class VideoLimits:
    """The limits of one video. The defaults bound the frames that are handed on to 0.8 GB. Decoding takes most of the
    time; `max_source_pixels` bounds it, and `MAX_SOURCE_FRAMES` for frames of few pixels."""

    max_frames: int = Field(default=768, ge=1, description="frames handed on to the model's processor")
    max_frame_pixels: int = Field(default=4096 * 2304, ge=1, description="pixels of one frame, width x height")
    max_total_pixels: int = Field(default=2**28, ge=1, description="pixels of all frames handed on, 3 bytes each")
    max_duration_s: float = Field(default=600.0, gt=0, description="seconds that a video may last")
    max_source_pixels: int = Field(
        default=2**34, ge=1, description="pixels of all frames decoded to find those handed on"
    )


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class AudioLimits:
    """The limits of one sound. The defaults bound it to 40 MB at 16 kHz, and its decoding to about two seconds: a few
    bytes may declare many samples of silence."""

    max_duration_s: float = Field(default=600.0, gt=0, description="seconds that a sound may last")
    max_source_samples: int = Field(default=2**27, ge=1, description="samples of all channels that are decoded")


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class MediaLimits:
    """The limits of one request's media."""

    max_items: int = Field(default=16, ge=0, description="media items per request")
    max_items_of: Annotated[
        dict[Literal["image", "video", "audio"], NonNegativeInt],
        Field(description="fewer of one kind, e.g. {video: 1}"),
    ] = field(default_factory=dict, hash=False)  # limits are keys of caches
    max_item_bytes: int = Field(default=20 * 2**20, ge=1, description="bytes of one encoded item")
    max_total_bytes: int = Field(default=96 * 2**20, ge=1, description="bytes of all encoded items of a request")
    max_image_pixels: int = Field(default=50_000_000, ge=1, description="pixels of one image, width x height")
    video: VideoLimits = Field(default_factory=VideoLimits, description="what one video may bring")
    audio: AudioLimits = Field(default_factory=AudioLimits, description="what one sound may bring")


def check_size(content: bytes | bytearray, limits: MediaLimits) -> None:
    """Raises InvalidRequestError for an empty item or one over `limits.max_item_bytes`."""
    if not content:
        raise invalid_media("the media item is empty (0 bytes)", "empty_media")
    if len(content) > limits.max_item_bytes:
        raise too_large(len(content), limits=limits)


def too_large(num_bytes: int, limits: MediaLimits) -> InvalidRequestError:
    """Returns the error for an item over the byte limit. `num_bytes` is how many bytes were seen so far."""
    reason = f"the media item has {num_bytes} bytes or more, the limit is {limits.max_item_bytes}"
    return invalid_media(reason, "media_too_large")


def decode_image(content: bytes, limits: MediaLimits) -> Image.Image:
    """Decodes an image to RGB: EXIF orientation applied, alpha composited on white, first frame only.

    The header is read and checked against `limits` before any pixel is decoded.
    Raises InvalidRequestError if the content is no image, truncated, too small or too large."""
    check_metadata(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about damaged or odd metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=_FORMATS)
            check_image_size(image.size, limits=limits)
            if image.format == "BMP" and image.tile[0].codec_name == "bmp_rle":
                # Pillow unpacks these in Python, which takes some microseconds for every two bytes.
                raise invalid_media("compressed BMPs are not read", "invalid_image")
            if image.format in ("JPEG", "MPO") and content.count(_START_OF_SCAN) > _MAX_SCANS:
                # The decoder goes over all pixels again for every scan, and 75 bytes are enough to ask for one.
                raise invalid_media(f"the JPEG has more than {_MAX_SCANS} scans", "invalid_image")
            _scale_transparent_grey(image)
            ImageOps.exif_transpose(image, in_place=True)  # otherwise it copies every picture
            return _to_rgb(image)
    except InvalidRequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason = f"the image has more pixels than can be decoded safely, {Image.MAX_IMAGE_PIXELS}"
        raise invalid_media(reason, "image_too_large") from error
    # Pillow's decoders raise many types on hostile bytes (OSError, SyntaxError, struct.error, ValueError, ...).
    except Exception as error:
        reason = f"the {len(content)} bytes are not a readable image ({', '.join(_FORMATS)})"
        raise invalid_media(reason, "invalid_image") from error


def check_shape(size: tuple[int, int], *, kind: str) -> None:
    """Raises InvalidRequestError if one side of an image or a video is too short, in itself or beside the other."""
    width, height = size
    shape = f"the {kind} is {width}x{height} pixels"
    if min(size) < MIN_SIDE:
        raise invalid_media(f"{shape}, each side needs at least {MIN_SIDE}", f"{kind}_too_small")
    if max(size) > MAX_ASPECT_RATIO * min(size):
        raise invalid_media(f"{shape}, one side may be {MAX_ASPECT_RATIO} times the other", f"{kind}_too_large")


def check_image_size(size: tuple[int, int], limits: MediaLimits) -> None:
    """Raises InvalidRequestError for a picture of `size` (width, height) that breaks a limit."""
    check_shape(size, kind="image")
    width, height = size
    if width * height > limits.max_image_pixels:
        limit = f"the limit is {limits.max_image_pixels} in all"
        raise invalid_media(f"the image is {width}x{height} pixels, {limit}", "image_too_large")


def _scale_transparent_grey(image: ImageFile.ImageFile) -> None:
    """Scales the transparent colour of a PNG (tRNS) as Pillow scales its pixels. Otherwise the model would see what
    viewers hide.

    Pillow brings pixels to 8 bits and leaves the transparent colour as it is in the file. Raises InvalidRequestError
    for a PNG of 16 bits, in which several colours become one colour of 8 bits."""
    colour = image.info.get("transparency")
    if image.format != "PNG" or colour is None or not image.tile:
        return
    raw_mode = image.tile[0].args
    if raw_mode in ("I;16B", "RGB;16B"):
        reason = "a PNG of 16 bits with a transparent colour is not read, send an alpha channel"
        raise invalid_media(reason, "invalid_image")
    if raw_mode in _GREY_STEPS:
        step = _GREY_STEPS[raw_mode]
        image.info["transparency"] = colour % (255 // step + 1) * step


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16"):
        # Pillow clips 16-bit grey at 255; scaling keeps its shades.
        return image.convert("I").point(lambda value: value / 257).convert("L").convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")
