"""Benchmark programs. Each prints one JSON document as its last line. No other package imports this one."""

import os
from pathlib import Path

from raylens.deployments.stages.process_setup import prepare_torch

# Ray's workers import stand-ins from here, but the checkout is not on their path.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])

# As in replicas, before torch or transformers is imported.
prepare_torch()
