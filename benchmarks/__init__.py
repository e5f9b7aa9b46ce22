"""Programs that measure; the last line that each prints is one JSON document. Nothing here is imported elsewhere."""

import os
from pathlib import Path

from raylens.deployments.stages.torch_setup import prepare_torch

# Ray's workers import stand-ins from here. Nothing of the checkout is on their path.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])

# As replicas do, before anything imports torch or transformers.
prepare_torch()
