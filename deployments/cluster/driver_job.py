"""From where Ray's workers import modules: from no folder of the driver."""

from typing import Any

from ray.job_config import JobConfig


class DriverJob(JobConfig):
    """Ray appends the working folder of a driver, and the folder of its script, to a list in this configuration. Its
    workers look into these folders before all others, so a folder `torch` in the working folder would be imported in
    the place of PyTorch. This list stays empty."""

    @property
    def _py_driver_sys_path(self) -> list[str]:
        return []

    @_py_driver_sys_path.setter
    def _py_driver_sys_path(self, folders: Any) -> None:
        """Keeps none."""
