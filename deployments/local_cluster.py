"""A Ray cluster of this machine alone, with one application on it: what `raylens serve` and `raylens demo` run."""

import logging
import math
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deployments.config import AppConfig

# Read by Ray's processes when they start. A reference that would be pinned for ever because it left Ray's sight raises
# instead; metrics reach /metrics within seconds; HAProxy is what speaks HTTP, not Ray's own proxy in Python, through
# which every byte of a body goes pickled.
RAY_ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_allow_out_of_band_object_ref_serialization": "0",
    "RAY_metrics_report_interval_ms": "2000",
    "RAY_worker_niceness": "5",  # Ray's 15 leaves no room below for `preprocess.niceness`
    "RAY_USAGE_STATS_ENABLED": "0",
}
APP_NAME = "raylens"
_READY_TIMEOUT_SECONDS = 300.0


@contextmanager
def running_app(
    config: AppConfig, *, host: str, port: int, dashboard: bool = False, say: Callable[[str], None] = print
) -> Iterator[str]:
    """Starts Ray and the application, yields its base URL once every stage is ready, and stops all of it.

    `say` is told about each step of the way. Raises RuntimeError when a stage does not start.
    """
    with (
        local_ray(host=host, port=port, num_cpus=config.num_reserved_cpus, dashboard=dashboard, say=say),
        deployed_app(config, host=host, port=port, say=say) as url,
    ):
        yield url


@contextmanager
def local_ray(
    *, host: str, port: int, num_cpus: float, dashboard: bool = False, say: Callable[[str], None] = print
) -> Iterator[None]:
    """A Ray cluster of this machine with Ray Serve's HTTP proxy on it; at least `num_cpus` are on offer."""
    for name, value in {**RAY_ENVIRONMENT, **_own_environment()}.items():
        os.environ.setdefault(name, value)
    # Imported only now: Ray reads its environment at import.
    import ray
    from ray import serve

    say("starting Ray")
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus)),
        include_dashboard=dashboard,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        say("starting Ray Serve")
        serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
        yield
    finally:
        ray.shutdown()


@contextmanager
def deployed_app(config: AppConfig, *, host: str, port: int, say: Callable[[str], None] = print) -> Iterator[str]:
    """Deploys the application on the running Ray Serve; yields its base URL once every stage is ready."""
    from ray import serve

    from deployments.app import build_app

    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    try:
        with _progress(say), _explaining_failure():
            serve.run(build_app(config), name=APP_NAME, route_prefix="/", logging_config={"log_level": "INFO"})
        _wait_until_ready(url)
        say("every stage is ready")
        yield url
    finally:
        say("shutting down")
        serve.delete(APP_NAME)


def _own_environment() -> dict[str, str]:
    """What a cluster of one machine needs besides: that a stage which cannot start says so at once, not after two more
    tries, which in a cluster may find another node; HAProxy's own ports apart from other clusters' there; no wait for
    a balancer in front of it when it stops; and Ray's proxy where Ray has no HAProxy."""
    tries = {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1"}
    if sys.platform != "linux":
        return {**tries, "RAY_SERVE_ENABLE_HA_PROXY": "0"}
    ports = ("HAPROXY_STATS_PORT", "HAPROXY_METRICS_PORT", "FALLBACK_PROXY_HTTP_PORT")
    return {
        **tries,
        **{f"RAY_SERVE_{name}": str(free_port()) for name in ports},
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _progress(say: Callable[[str], None]) -> Iterator[None]:
    """Says, while the block runs, which stages are up."""
    done = threading.Event()
    thread = threading.Thread(target=_report_states, args=(done, say), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _explaining_failure() -> Iterator[None]:
    """Ray Serve says only which stage did not start; its status has the traceback, which ends with why."""
    from ray import serve

    try:
        yield
    except RuntimeError:
        application = serve.status().applications.get(APP_NAME)
        stages = {} if application is None else application.deployments
        failed = {name: stage.message for name, stage in stages.items() if stage.status.endswith("FAILED")}
        if not failed:
            raise
        reasons = [f"{name} did not start: {message.strip().splitlines()[-1]}" for name, message in failed.items()]
        raise RuntimeError("; ".join(reasons)) from RuntimeError("\n".join(failed.values()))


def _report_states(done: threading.Event, say: Callable[[str], None]) -> None:
    from ray import serve

    started, last = time.monotonic(), ""
    while not done.wait(1.0):
        application = serve.status().applications.get(APP_NAME)
        if application is None:
            continue
        states = {name.lower(): stage.status.lower() for name, stage in application.deployments.items()}
        states = {name: {"healthy": "ready", "updating": "loading"}.get(state, state) for name, state in states.items()}
        line = ", ".join(f"{name} {state}" for name, state in sorted(states.items()))
        if line != last:
            say(f"{time.monotonic() - started:5.1f} s  {line}")
            last = line


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    raise RuntimeError(f"not every stage was ready after {_READY_TIMEOUT_SECONDS:.0f} s")
