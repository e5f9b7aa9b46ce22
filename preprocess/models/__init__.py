"""The declarations of model families for the processor; `modeling/families.py` says which file has which."""

from raylens.modeling.torchvision_build import make_importable

# Before any of them: families take functions from modules of transformers that import torchvision.
make_importable()
