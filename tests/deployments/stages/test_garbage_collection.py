"""What a process has imported is not looked at again when garbage is collected."""

import subprocess
import sys

ACT = """
import gc
import raylens.deployments.endpoint.ingress
from raylens.deployments.stages.garbage_collection import skip_startup_objects
before = len(gc.get_objects())
skip_startup_objects()
print(before, gc.get_freeze_count(), len(gc.get_objects()))
"""


def test_objects_of_the_start_are_left_out() -> None:
    done = subprocess.run([sys.executable, "-c", ACT], capture_output=True, text=True, check=True)
    num_before, num_frozen, num_left = map(int, done.stdout.split())
    assert num_frozen > 50_000
    assert num_left < num_before / 100
