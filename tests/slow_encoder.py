"""A small checkpoint whose pictures take long to encode, for they are large."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.pictures import encoded
from tests.small_models import make_checkpoint


def make_slow_checkpoint(folder: Path, side: int) -> str:
    """Encodes a picture of 700 pixels a side in 0.1 s, of 1400 in more than a second."""
    checkpoint = make_checkpoint("qwen2_vl", folder)
    file = Path(checkpoint) / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"] = {"shortest_edge": 3136, "longest_edge": side**2}
    file.write_text(json.dumps(settings))
    return checkpoint


def large_picture(number: int, side: int) -> bytes:
    """Coloured squares that no other number gives."""
    squares = np.random.default_rng(number).integers(0, 256, (side // 20, side // 20, 3), dtype=np.uint8)
    return encoded(Image.fromarray(squares).resize((side, side), Image.Resampling.NEAREST))
