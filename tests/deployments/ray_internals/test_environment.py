"""Ray reads each variable that we set."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import ray

from raylens.deployments.ray_internals import environment
from raylens.deployments.ray_internals.driver import WITHOUT_METRICS, no_driver_metrics
from raylens.deployments.ray_internals.haproxy_config import haproxy_variables

ROOT = Path(ray.__file__).parent
FOLDER = Path("/folder")
ALL = {
    **environment.RAY_ENVIRONMENT,
    **environment.ONE_MACHINE,
    **environment.WITHOUT_DASHBOARD,
    **environment.WITHOUT_HAPROXY,
    **environment.draining(1.5),
    **environment.fallback_port(1),
    **environment.head_storage(FOLDER),
    **WITHOUT_METRICS,
    **haproxy_variables(FOLDER, FOLDER / "program", 7),
}
OF_PYTHON = "PYTHONSAFEPATH"
OF_RAYS_LIBRARY = re.compile(r"RAY_[a-z_]+")
READERS = (
    *("serve/_private/constants.py", "_private/ray_constants.py", "_private/serialization.py"),
    *("_common/usage/usage_constants.py", "dashboard/consts.py", "dashboard/modules/reporter/reporter_consts.py"),
)
VALUES = {
    "RAY_SERVE_ENABLE_HA_PROXY": True,
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": False,
    "PROXY_HEALTH_CHECK_PERIOD_S": 1.0,
    "RAY_SERVE_HAPROXY_MAXCONN": 7,
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": 1.5,
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "/folder/haproxy.cfg",
}
"""Constants of Ray Serve, and what it makes of some of the values."""


@cache
def library() -> bytes:
    return (ROOT / "_raylet.so").read_bytes()


@pytest.mark.parametrize("name", sorted({*ALL} - {OF_PYTHON}))
def test_ray_reads_the_variable(name: str) -> None:
    in_python = any(f'"{name}"' in (ROOT / file).read_text() for file in READERS)
    assert in_python or (OF_RAYS_LIBRARY.fullmatch(name) and b"\0" + name.encode() + b"\0" in library())


def test_ray_serve_understands_the_values() -> None:
    code = f"from ray.serve._private import constants as c; print([getattr(c, n) for n in {[*VALUES]}])"
    told = subprocess.check_output([sys.executable, "-c", code], env=ALL | environment.RAY_ENVIRONMENT, text=True)
    assert told.strip() == str([*VALUES.values()])


def test_only_this_process_has_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = WITHOUT_METRICS
    monkeypatch.setenv(first, "kept")
    monkeypatch.delenv(second, raising=False)
    printed = [sys.executable, "-c", f"import os; print(os.environ.get('{first}'), os.environ.get('{second}'))"]

    def seen() -> str:
        return subprocess.check_output(printed, text=True).strip()

    with no_driver_metrics():
        assert own_variables() == {"0"}
        inside = seen()
    assert (inside, seen()) == ("0 0", "kept None")


def own_variables() -> set[str]:
    """Returns the values of the variables as a library in this process reads them."""
    import ctypes

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    return {getenv(name.encode()).decode() for name in WITHOUT_METRICS}
