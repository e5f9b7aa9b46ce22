"""The folder of this process's Ray session on its node."""

from pathlib import Path

import ray


def session_folder() -> Path:
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())
