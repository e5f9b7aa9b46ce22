"""Nothing that changes an item's processed result may leave its hash unchanged."""

from typing import Any

from PIL import Image

from raylens.preprocess.hasher import content_hash, mm_hash
from tests.pictures import disc, encoded


def test_every_part_counts() -> None:
    base: dict[str, Any] = {
        "hashed_content": "c",
        "modality": "image",
        "model": "",
        "processor_fingerprint": "p",
        "options": {"max_pixels": 1000},
        "is_among_others": False,
        "is_precomputed": False,
        "cache_salt": "t",
    }
    others: dict[str, Any] = {
        "hashed_content": "d",
        "modality": "video",
        "model": "-other",
        "processor_fingerprint": "q",
        "options": {"max_pixels": 1001},
        "is_among_others": True,
        "is_precomputed": True,
        "cache_salt": "u",
    }
    hashes = {mm_hash(**base)} | {mm_hash(**{**base, name: other}) for name, other in others.items()}
    assert len(hashes) == len(base) + 1
    assert all(len(value) == 64 for value in hashes)


def test_the_order_of_options_does_not_count() -> None:
    first, second = (
        mm_hash("c", modality="image", processor_fingerprint="p", options=options)
        for options in ({"a": 1, "b": True}, {"b": True, "a": 1})
    )
    assert first == second


def test_parts_do_not_run_together() -> None:
    first = mm_hash("c", modality="image", processor_fingerprint="ab", cache_salt="")
    second = mm_hash("c", modality="image", processor_fingerprint="a", cache_salt="b")
    third = mm_hash("bc", modality="image", processor_fingerprint="a", cache_salt="")
    assert len({first, second, third}) == 3


def test_pictures_that_differ_only_in_form_keep_apart() -> None:
    grey = Image.new("L", (32, 32), 128)
    forms = [grey, grey.convert("RGB"), grey.convert("RGBA"), grey.convert("P"), grey.resize((33, 32))]
    contents = [encoded(image) for image in forms] + [encoded(disc("red")), encoded(disc("red"), "BMP")]
    exif = Image.Exif()
    exif[0x0112] = 6
    contents += [encoded(grey, "JPEG"), encoded(grey, "JPEG", exif=exif)]
    assert len({content_hash(content) for content in contents}) == len(contents)
