"""A driver whose folders its workers do not import from.

Ray 2.60: a driver sends its working folder and its script's folder (`_py_driver_sys_path` of its `JobConfig`) to its
workers, which import from there first.
Needed: a folder `torch` where the server is started is not imported as PyTorch.
Test: `tests/deployments/ray_internals/test_driver.py`, `test_a_driver_s_folders_do_not_reach_its_workers`;
`tests/test_package.py` serves from a folder with such packages.
Way back: an option of `JobConfig`. ray-project/ray#43214 left the list empty for jobs with a `working_dir`; #44435
reverted it."""

from typing import Any

from ray.job_config import JobConfig


class DriverJob(JobConfig):
    """The list stays empty."""

    @property
    def _py_driver_sys_path(self) -> list[str]:
        return []

    @_py_driver_sys_path.setter
    def _py_driver_sys_path(self, folders: Any) -> None:
        """Keeps none."""
