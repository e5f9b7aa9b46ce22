"""Raises the limit of open files for the server's processes: each client connection takes some."""

import resource

from raylens.deployments.cluster.haproxy import MAX_CONNECTIONS
from raylens.deployments.ray_internals.haproxy_config import ConnectionLimits

_ENOUGH = 2**16


def allow_open_files() -> str | None:
    """Raises this process's limit of open files, inherited by its children, to the server's need or the system's
    maximum. Returns a warning if that is too few for the endpoint's connections."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = _ENOUGH
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, _ENOUGH)), most))
    total = ConnectionLimits.within(MAX_CONNECTIONS, most).total
    if total == MAX_CONNECTIONS:
        return None
    return (
        f"warning: the endpoint takes {total} connections at a time instead of {MAX_CONNECTIONS}, because its "
        f"processes may open {most} files. Allow them {ConnectionLimits.files_for(MAX_CONNECTIONS)} "
        "(`ulimit -Hn`, LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
    )
