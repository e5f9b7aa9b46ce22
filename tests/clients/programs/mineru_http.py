"""`mineru-vl-utils`, which finds a page's blocks and then reads each: its client of a server like vLLM's."""

from features import ABOUT_PICTURE, KEY, MODEL, PICTURE_FILE, URL, is_equal, report
from mineru_vl_utils import MinerUClient
from PIL import Image

client = MinerUClient(
    "http-client", model_name=MODEL, server_url=URL, server_headers={"Authorization": f"Bearer {KEY}"}
)


def two_step_extraction():
    # The places are special tokens, which it asks the server to keep.
    (block,) = client.two_step_extract(Image.open(PICTURE_FILE), priority=1)
    is_equal((block.type, block.bbox, block.angle), ("title", [0.1, 0.2, 0.9, 0.8], 0))
    is_equal(block.content, ABOUT_PICTURE)


report(two_step_extraction)
