"""From where workers of Ray import modules."""

from typing import Any

from ray.job_config import JobConfig


def job_config() -> JobConfig:
    """Returns a configuration of a driver whose workers import nothing from its folders.

    Ray appends the working folder of a driver, and the folder of its script, to a list in the configuration. Its
    workers look into these folders before all others, so a folder `torch` in the working folder would be imported in
    the place of PyTorch."""
    return _WithoutFolders()


class _WithoutFolders(JobConfig):
    @property
    def _py_driver_sys_path(self) -> list[str]:
        return []

    @_py_driver_sys_path.setter
    def _py_driver_sys_path(self, folders: Any) -> None:
        """Keeps none."""
