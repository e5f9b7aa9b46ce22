"""An item of media as a client sent it."""

from dataclasses import dataclass

UPLOAD_SCHEME = "upload:"
"""Begins URLs that stand for files which were uploaded before."""


@dataclass(frozen=True, slots=True)
class MediaSource:
    """A URL (data:, http(s):, file: or upload:), a name for it (`uuid`), or both. A name alone stands for the item that
    was last sent with it. `field` names the item in errors. `is_precomputed`: the content is no media file but
    tensors, see `preprocess.precomputed`."""

    url: str | None
    field: str
    modality: str = "image"
    is_precomputed: bool = False
    uuid: str | None = None


def upload_url(file_id: str) -> str:
    return UPLOAD_SCHEME + file_id
