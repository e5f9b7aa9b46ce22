"""`make quick` starts no server and no Ray."""

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_MODULES = {
    "test_server.py": "def test_server(app_url):\n    pass\n",
    "test_matrix.py": "import pytest\n\n@pytest.mark.parametrize('n', range(3))\ndef test_matrix(n):\n    pass\n",
    "test_ray.py": 'from ray import init\n\ndef test_ray():\n    init(address="local")\n',
}


def test_it_runs_one_case_of_a_matrix_no_module_with_a_server_and_nothing_that_starts_ray(tmp_path: Path) -> None:
    folder = tmp_path / "llm"
    folder.mkdir()
    for name, source in _MODULES.items():
        (folder / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.quick", "--noconftest", str(folder)]
    told = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False).stdout
    assert "1 failed, 1 passed in" in told
    assert "a test of `make quick` starts Ray" in told
