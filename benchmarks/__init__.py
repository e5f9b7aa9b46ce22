"""Benchmark programs. Each prints one JSON document as its last line. No other package imports this one."""

import os
from pathlib import Path

from raylens.deployments.stages.process_setup import prepare_torch

# Ray's workers import stand-ins from here, but the checkout is not on their path.
_others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(Path(__file__).parents[1]), *_others]))

# As in replicas, before torch or transformers is imported.
prepare_torch()
