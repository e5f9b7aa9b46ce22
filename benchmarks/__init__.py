"""Programs that measure; the last line that each prints is one JSON document. Nothing here is imported elsewhere."""

from modeling.torchvision_build import make_importable

# Before anything imports transformers.
make_importable()
