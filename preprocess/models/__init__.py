"""What the processor needs to know about each model family; `modeling/families.py` says which file has which."""

from raylens.modeling.torchvision_build import make_importable

# Before any of them: families take functions from modules of transformers that import torchvision.
make_importable()
