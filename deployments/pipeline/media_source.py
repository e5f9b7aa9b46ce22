"""An item of media as a client sent it."""

from dataclasses import dataclass

from raylens.deployments.pipeline.long_texts import LongTexts
from raylens.preprocess.data_url import DataUrl, is_data_url

UPLOAD_SCHEME = "upload:"
"""The scheme of URLs of uploaded files."""


@dataclass(frozen=True, slots=True)
class MediaSource:
    """A URL (data:, http(s):, file: or upload:), a name for it (`uuid`), or both. A name alone stands for the item last
    sent with it. `field`: the item's name in errors. `is_precomputed`: the content is tensors, not a media file, see
    `preprocess/precomputed.py`. `texts`: the long texts of its body. `num_pixels`: the work of an item whose content is
    in the URL itself, see `preprocess/pixel_count.py`."""

    url: str | None
    field: str
    modality: str = "image"
    is_precomputed: bool = False
    uuid: str | None = None
    texts: LongTexts | None = None
    num_pixels: int = 0

    @property
    def data(self) -> DataUrl | None:
        """The content, if it is in the URL itself."""
        if self.url is None or not is_data_url(self.url):
            return None
        return DataUrl([self.url.encode()] if self.texts is None else self.texts.pieces(self.url))


def upload_url(file_id: str) -> str:
    return UPLOAD_SCHEME + file_id
