"""A driver that exports no metrics.

Ray 2.60: the driver exports metrics in a thread of each session. OpenTelemetry's SDK in `_raylet.so` shuts down once in
a process: it joins the thread of the first session only. The threads of later sessions run on after `ray.shutdown()`.

Needed: a process that had several sessions ends cleanly. Such threads export while the process destroys the library's
static objects, and some runs die of a segmentation fault after all their work. The other processes of the cluster
report what Ray and Ray Serve measure.

Test: `tests/deployments/test_ray_session.py`, `tests/deployments/ray_internals/test_environment.py`.

Way back: an argument of `ray.init` that turns the driver's metrics off, or a driver that joins its exporter at each
`ray.shutdown()` (see ray-project/ray#60048 for a crash of the same kind)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

WITHOUT_METRICS = {"RAY_enable_open_telemetry": "0", "RAY_enable_metrics_collection": "0"}


@contextmanager
def no_driver_metrics() -> Iterator[None]:
    """Makes a driver that starts in the block export no metrics. The processes that Ray starts get `os.environ`, which
    stays as it is."""
    for name, value in WITHOUT_METRICS.items():
        os.putenv(name, value)
    try:
        yield
    finally:
        for name in WITHOUT_METRICS:
            if name in os.environ:
                os.putenv(name, os.environ[name])
            else:
                os.unsetenv(name)
