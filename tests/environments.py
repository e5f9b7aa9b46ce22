"""Virtual environments for programs whose packages are not those of the tests."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def make_environment(folder: Path, *installations: Sequence[str]) -> str:
    """Returns the path of its Python. `installations`: each with the arguments of `uv pip install`."""
    uv, python = str(Path(sys.executable).with_name("uv")), str(folder / "bin" / "python")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(folder)], check=True)
    for arguments in installations:
        subprocess.run([uv, "pip", "install", "-q", "--python", python, *arguments], check=True)
    return python
