"""Processes that get a share of a core and no more, by a control group of Linux: root, version 1 or 2."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_PERIOD_US = 20_000
_ROOT = Path("/sys/fs/cgroup")


class NoControlGroupsError(RuntimeError):
    """Control groups cannot be made here."""


@contextmanager
def cpu_share(pids: Sequence[int], share: float) -> Iterator[None]:
    """Gives each of the processes, with all its threads, `share` of a core while the block runs. Raises
    NoControlGroupsError."""
    with ExitStack() as stack:
        for pid in pids:
            stack.enter_context(_group(pid, share))
        yield


@contextmanager
def _group(pid: int, share: float) -> Iterator[None]:
    is_first = (_ROOT / "cpu").is_dir()
    parent = _ROOT / "cpu" if is_first else _ROOT
    group = parent / f"raylens-{pid}"
    quota = int(_PERIOD_US * share)
    try:
        group.mkdir()
        if is_first:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise NoControlGroupsError(f"no control group for a share of a core: {error}") from error
    try:
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()
