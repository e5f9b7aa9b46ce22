"""Which processes of the driver's own Ray have ended.

Ray 2.60: the driver's node object holds the processes that `ray.init` has started. No public function tells whether
they run: public calls wait for answers of a dead cluster without a limit.

Needed: `raylens serve` ends with a message when the raylet or the GCS server has died.

Test: `tests/deployments/ray_internals/test_on_ray.py`, `test_the_vital_processes_of_this_driver_s_ray_run`;
`tests/deployments/test_server_endings.py` kills them.

Way back: a call that raises when the cluster is gone, or a public list of the processes of `ray.init`. No issue is
known."""

_VITAL = ("raylet", "gcs_server")
"""The processes that a cluster cannot do without, by Ray's names."""


def ended_vital_process() -> tuple[str, int] | None:
    """Returns the name and the exit status of one that has ended, if any. Without a Ray of its own, a driver has none
    that could end."""
    from ray._private.worker import _global_node

    for kind, process in [] if _global_node is None else _global_node.dead_processes():
        if kind in _VITAL:
            return kind, process.returncode
    return None
