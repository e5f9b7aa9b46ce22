"""The declarations of model families for the processor; `modeling/families.py` maps families to files."""

from raylens.modeling.torchvision_build import make_importable

# Before the families, which import modules of transformers that import torchvision.
make_importable()
