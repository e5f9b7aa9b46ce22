"""How many files the server's processes may open: each connection of a client takes some of them."""

import resource

from raylens.deployments.cluster.haproxy import MAX_CONNECTIONS
from raylens.deployments.ray_internals.haproxy_config import ConnectionLimits

_ENOUGH = 2**16


def allow_open_files() -> str | None:
    """Lets this process, and those that it starts, open as many files as the server needs, or as the system allows.
    Returns a warning where that is too few for the connections of the endpoint."""
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
