"""The folder of the Ray session that this process belongs to, on its node."""

from pathlib import Path

import ray


def session_folder() -> Path:
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())
