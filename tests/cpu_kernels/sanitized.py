"""Runs the kernels' tests with libraries that check each access to memory and each operation without a defined result.

python -m tests.cpu_kernels.sanitized
"""

import os
import subprocess
import sys
import tempfile

from setup import BUILDS, CSRC, FLAGS
from tests.cpu_kernels.conftest import SANITIZED

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"]


def main() -> int:
    asan, ubsan = (
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    )
    with tempfile.TemporaryDirectory() as folder:
        for build, flags in BUILDS.items():
            command = ["g++", *FLAGS, *flags, *SANITIZERS, "-fPIC", "-shared", str(CSRC / f"{build}.cpp")]
            subprocess.run([*command, "-o", f"{folder}/{build}.so"], check=True)
        environment = os.environ | {
            SANITIZED: folder,
            "LD_PRELOAD": f"{asan} {ubsan}",
            "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaves memory behind at its end
        }
        command = [sys.executable, "-m", "pytest", "-q", "-s", "tests/cpu_kernels"]  # -s: what a sanitizer says is seen
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
