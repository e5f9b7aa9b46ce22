"""What a replica does before it loads torch."""

import subprocess
import sys

CHECK = """
import os, sys
from raylens.deployments.stages import encode_stage, generate_stage, preprocess_stage
from raylens.deployments.stages.torch_setup import set_up_torch
assert "torch" not in sys.modules, "its threads are set up when it is loaded"
set_up_torch(2)
import torch
assert torch.get_num_threads() == 2
assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
"""


def test_torch_is_set_up_before_it_is_loaded() -> None:
    subprocess.run([sys.executable, "-c", CHECK], check=True)
