"""A driver that keeps its own handler of SIGTERM while Ray starts.

Ray 2.60: `ray.init` installs a handler of SIGTERM in the driver, in place of the driver's own. It calls `sys.exit`.

Needed: a SIGTERM that comes while Ray starts waits until Ray has started (`deployments/cluster/late_signals.py`). A
half-started driver can neither be stopped cleanly nor interrupted.

Test: `tests/deployments/ray_internals/test_driver.py`, `test_ray_sets_its_handler_by_the_function_that_is_replaced`;
`tests/deployments/test_ray_session.py`, `test_signals_wait_until_ray_has_started`.

Way back: an argument of `ray.init` that leaves signals alone. ray-project/ray#17308 and #46997 asked for it and were
closed without one."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Keeps Ray from installing its handler while the block runs."""
    from ray._private import utils

    def set_none(handler: object) -> None:
        """Stands in for Ray's function."""

    set_by_ray = utils.set_sigterm_handler
    utils.set_sigterm_handler = set_none
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_by_ray
