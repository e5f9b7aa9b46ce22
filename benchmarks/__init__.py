"""Programs that measure; the last line that each prints is one JSON document. Nothing here is imported elsewhere."""

import os

# As replicas do (`deployments.stages.torch_setup`), before anything imports torch or transformers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from modeling.torchvision_build import make_importable

make_importable()
