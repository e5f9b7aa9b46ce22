"""A replica sets up torch before it loads it, leaves startup objects out of garbage collection, and keeps no memory
that only its start needed."""

import os
import subprocess
import sys

from raylens.deployments.stages.process_setup import MALLOC_VARIABLES

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
from raylens.deployments.stages.process_setup import end_startup
before = len(gc.get_objects())
end_startup()
print(before, gc.get_freeze_count(), len(gc.get_objects()))
"""
FREE = """
from pathlib import Path
from raylens.deployments.stages.process_setup import end_startup
def num_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])
blocks = [b"1" * 2**20 for _ in range(100)]
blocks.clear()
before = num_pages()
end_startup()
print((before - num_pages()) * 4096)
"""


def test_torch_is_set_up_before_it_is_loaded() -> None:
    subprocess.run([sys.executable, "-c", CHECK], check=True)


def test_objects_of_the_start_are_left_out() -> None:
    done = subprocess.run([sys.executable, "-c", ACT], capture_output=True, text=True, check=True)
    num_before, num_frozen, num_left = map(int, done.stdout.split())
    assert num_frozen > 50_000
    assert num_left < num_before / 100


def test_memory_of_the_start_is_given_back() -> None:
    environment = os.environ | MALLOC_VARIABLES
    done = subprocess.run([sys.executable, "-c", FREE], capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) > 80 * 2**20
