"""What of a server the clients of the field can use: see `table.py`."""

from raylens.modeling.torchvision_build import make_importable

make_importable()  # before transformers is imported
