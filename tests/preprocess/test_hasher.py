"""Nothing that changes an item's processed result may leave its hash unchanged."""

from PIL import Image

from preprocess.hasher import mm_hash
from tests.pictures import disc, encoded


def test_every_part_counts() -> None:
    base = {"modality": "image", "processor_fingerprint": "p", "tenant_salt": "t"}
    hashes = {mm_hash(b"content", **base), mm_hash(b"other", **base)}
    hashes |= {mm_hash(b"content", **{**base, name: value + "x"}) for name, value in base.items()}
    assert len(hashes) == 5
    assert all(len(value) == 64 for value in hashes)


def test_parts_do_not_run_together() -> None:
    first = mm_hash(b"c", modality="image", processor_fingerprint="ab", tenant_salt="")
    second = mm_hash(b"c", modality="image", processor_fingerprint="a", tenant_salt="b")
    third = mm_hash(b"bc", modality="image", processor_fingerprint="a", tenant_salt="")
    assert len({first, second, third}) == 3


def test_pictures_that_differ_only_in_form_keep_apart() -> None:
    grey = Image.new("L", (32, 32), 128)
    forms = [grey, grey.convert("RGB"), grey.convert("RGBA"), grey.convert("P"), grey.resize((33, 32))]
    contents = [encoded(image) for image in forms] + [encoded(disc("red")), encoded(disc("red"), "BMP")]
    exif = Image.Exif()
    exif[0x0112] = 6
    contents += [encoded(grey, "JPEG"), encoded(grey, "JPEG", exif=exif)]
    hashes = {mm_hash(content, modality="image", processor_fingerprint="p") for content in contents}
    assert len(hashes) == len(contents)
