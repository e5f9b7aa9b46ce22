"""`benchmarks.soak` in little: each of its victims is killed once, under load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import VICTIMS

ROOT = Path(__file__).parents[2]
PERIOD = 5.0


@pytest.mark.slow
def test_under_kills_every_answer_is_right_and_nothing_is_left() -> None:
    minutes = (len(VICTIMS) + 0.5) * PERIOD / 60
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", str(minutes), "--period", str(PERIOD)]
    soak = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert soak.returncode == 0, soak.stdout + soak.stderr
    document = json.loads(soak.stdout.splitlines()[-1])
    assert document["measured"]["kills"] == len(VICTIMS)
