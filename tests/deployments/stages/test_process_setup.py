"""A replica sets up torch before it loads it, and leaves startup objects out of garbage collection."""

import subprocess
import sys

CHECK = """
import os, sys
from raylens.deployments.stages import encode_stage, generate_stage, preprocess_stage
from raylens.deployments.stages.process_setup import set_up_torch
assert "torch" not in sys.modules, "its threads are set up when it is loaded"
set_up_torch(2)
import torch
assert torch.get_num_threads() == 2
assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
"""
ACT = """
import gc
import raylens.deployments.endpoint.ingress
from raylens.deployments.stages.process_setup import skip_startup_objects
before = len(gc.get_objects())
skip_startup_objects()
print(before, gc.get_freeze_count(), len(gc.get_objects()))
"""


def test_torch_is_set_up_before_it_is_loaded() -> None:
    subprocess.run([sys.executable, "-c", CHECK], check=True)


def test_objects_of_the_start_are_left_out() -> None:
    done = subprocess.run([sys.executable, "-c", ACT], capture_output=True, text=True, check=True)
    num_before, num_frozen, num_left = map(int, done.stdout.split())
    assert num_frozen > 50_000
    assert num_left < num_before / 100
