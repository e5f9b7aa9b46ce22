"""Pictures within the limit of pixels that would take time or memory without end."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raylens.preprocess.media import MediaLimits, decode_image
from raylens.preprocess.schema import InvalidRequestError
from tests.pictures import encoded
from tests.preprocess.image_bombs import BOMBS, HARMLESS

SECONDS = 2.0


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each scan refines all pixels once more, whatever few bytes ask for it."""
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    content = encoded(Image.fromarray(noise), "JPEG", progressive=True)
    assert decode_image(content, MediaLimits()).size == (256, 256)
    start = content.rindex(b"\xff\xda")
    last_scan, end = content[start:-2], content[-2:]
    with pytest.raises(InvalidRequestError, match="more than 100 scans"):
        decode_image(content[:start] + last_scan * 101 + end, MediaLimits())


def test_tiffs_are_no_pictures_here() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "TIFF")
    with pytest.raises(InvalidRequestError, match="not a readable image"):
        decode_image(buffer.getvalue(), MediaLimits())


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[str, float]]:
    """What came of each bomb, in a process with little memory, and the seconds of CPU that it took."""
    command = [sys.executable, "-m", "tests.preprocess.image_bombs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=Path(__file__).parent.parent.parent)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    outcomes: dict[str, tuple[str, float]] = json.loads(done.stdout)
    return outcomes


@pytest.mark.skipif(sys.platform != "linux", reason="bounds memory as Linux does")
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(found: dict[str, tuple[str, float]], name: str) -> None:
    outcome, seconds = found[name]
    assert outcome in ("invalid_image", "image_too_large")
    assert seconds < SECONDS


@pytest.mark.skipif(sys.platform != "linux", reason="bounds memory as Linux does")
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_not_needed_costs_nothing(found: dict[str, tuple[str, float]], name: str) -> None:
    outcome, seconds = found[name]
    assert outcome == "(64, 64)"
    assert seconds < SECONDS
