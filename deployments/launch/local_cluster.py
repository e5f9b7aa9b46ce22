"""A Ray cluster on this machine only, with one application, for `raylens serve` and `raylens demo`."""

import errno
import logging
import math
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from raylens.deployments.cluster.haproxy import BIND_VARIABLE, allow_open_files, haproxy_environment
from raylens.deployments.cluster.other_users import bounded_connections
from raylens.deployments.cluster.private_files import keep_ray_token_private, private_folder
from raylens.deployments.cluster.ray_session import NoRayError, ask_ray, ray_session
from raylens.deployments.cluster.server_processes import marked, owned_processes
from raylens.deployments.cluster.worker_template import worker_template
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.item_store.kept_files import FOLDER_VARIABLE
from raylens.deployments.launch.app_lifetime import end_app, start_app
from raylens.deployments.launch.config_file import ConfigError
from raylens.deployments.placement import lacking
from raylens.deployments.ray_internals import environment
from raylens.deployments.server_log import FILE_VARIABLE, ray_logging, shown

_NEWS_SECONDS = 10.0
"""Grace period: a stopping replica of the ingress keeps serving this long, so that HAProxy hears of its end."""
APP_NAME = "raylens"
LOGGING = {"log_level": "INFO", "enable_access_log": False}
"""The logging of replicas, without Ray Serve's access log: the ingress logs requests, and a stage gets many calls."""
LOOPBACK = "127.0.0.1"
HAS_HAPROXY = sys.platform == "linux"
_READY_TIMEOUT_SECONDS = 300.0
_POLL_SECONDS = 0.1
_HEALTH_SECONDS = 5.0
_DRAIN_SECONDS = 8.0
_KILL_SECONDS = 5.0  # in which Ray Serve kills the replicas that still answer after `drain_seconds`
_LAST_ANSWER_SECONDS = 5.0  # a raylet that gets the signal, too, stops answering at once and ends after 10 s
_LOG_FILE = "server.log"


def print_at_once(line: str) -> None:
    """Prints the line without Python's buffering of pipes and files."""
    print(line, flush=True)


@contextmanager
def running_app(
    config: AppConfig,
    *,
    host: str,
    port: int,
    dashboard: bool = False,
    say: Callable[[str], None] = print_at_once,
    log: TextIO | None = None,
) -> Iterator[str]:
    """Starts Ray and the application, yields its base URL once every stage is ready, and stops everything. `say` gets a
    line for each step of the start, `log` the stages' log. Raises RuntimeError if a stage does not start."""
    num_cpus, scales = config.num_reserved_cpus, config.ingress.max_replicas > config.ingress.min_replicas
    ray = local_ray(
        host=host, port=port, num_cpus=num_cpus, ingress_scales=scales, dashboard=dashboard, say=say, log=log
    )
    with ray, deployed_app(config, host=host, port=port, say=say) as url:
        yield url


@contextmanager
def local_ray(
    *,
    host: str,
    port: int,
    num_cpus: float,
    ingress_scales: bool = False,
    dashboard: bool = False,
    say: Callable[[str], None] = print_at_once,
    log: TextIO | None = None,
) -> Iterator[None]:
    """Runs Ray Serve on a Ray cluster of this machine with at least `num_cpus` CPUs. Only the endpoint listens on
    `host`, all else on loopback. `ingress_scales`: replicas of the ingress may end while others serve."""
    keep_ray_token_private(Path.home())
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder())
        stack.enter_context(owned_processes(folder))
        grace_s = _NEWS_SECONDS if ingress_scales else 0  # else every ingress ends with the server
        variables = _variables(folder, host, grace_s) | ({} if dashboard else environment.WITHOUT_DASHBOARD)
        stack.enter_context(_environment(variables))
        if log is not None:
            stack.enter_context(shown(folder / _LOG_FILE, log))
        if (warning := allow_open_files()) is not None:
            say(warning)
        say("starting Ray")
        offered = max(os.cpu_count() or 1, math.ceil(num_cpus))
        stack.enter_context(bounded_connections(folder, public_port=port))
        with marked(folder):
            stack.enter_context(_environment(stack.enter_context(worker_template(folder))))
            stack.enter_context(ray_session(offered, dashboard=dashboard, temp_dir=folder / "ray"))
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        say("starting Ray Serve")
        http_options = {"host": LOOPBACK if HAS_HAPROXY else host, "port": port}
        start = partial(serve.start, http_options=http_options, logging_config={"log_level": "WARNING"})
        ask_ray(start, timeout_s=_READY_TIMEOUT_SECONDS)
        yield


@contextmanager
def deployed_app(
    config: AppConfig, *, host: str, port: int, say: Callable[[str], None] = print_at_once
) -> Iterator[str]:
    """Deploys the application; yields its base URL once every stage is ready. Raises RuntimeError at once if this
    machine lacks a resource that a stage reserves, because no other node can join."""
    import ray

    from raylens.deployments.app import build_app

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if missing := lacking(config, nodes, "this machine"):
        raise RuntimeError("; ".join(f"{stage} waits for {what}" for stage, what in missing.items()))
    url = f"http://{reachable_host(host)}:{port}"
    config = on_one_machine(config)
    try:
        start_app(build_app(config), APP_NAME, {**LOGGING, **ray_logging()}, say)
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        if (failure := wait_for_health(url, deadline, _POLL_SECONDS)) is not None:
            raise RuntimeError(f"not every stage was ready after {_READY_TIMEOUT_SECONDS:.0f} s") from failure
        say("every stage is ready")
        yield url
    finally:
        say("shutting down")
        with suppress(NoRayError):  # its processes are killed later
            end_app(APP_NAME, within_s=config.updates.drain_seconds + _KILL_SECONDS, answer_s=_LAST_ANSWER_SECONDS)


def on_one_machine(config: AppConfig) -> AppConfig:
    """Returns the settings with other defaults: a short drain, because a user waits at a prompt, and no fixed metrics
    port, because the endpoint reads its own node's metrics anyway."""
    updates, metrics = config.updates, config.metrics
    if "drain_seconds" not in updates.model_fields_set:
        updates = updates.model_copy(update={"drain_seconds": _DRAIN_SECONDS})
    if "port" not in metrics.model_fields_set:
        metrics = metrics.model_copy(update={"port": 0})
    return config.model_copy(update={"updates": updates, "metrics": metrics})


def _variables(folder: Path, host: str, grace_s: float) -> dict[str, str]:
    """Returns the environment of a cluster of one machine. HAProxy's files are in `folder`, and its ports are separate
    from other clusters' ports on this machine. Without HAProxy, Ray's own proxy speaks HTTP."""
    variables = environment.RAY_ENVIRONMENT | environment.ONE_MACHINE | environment.draining(grace_s)
    variables |= {FOLDER_VARIABLE: str(folder), FILE_VARIABLE: str(folder / _LOG_FILE)}
    if not HAS_HAPROXY:
        return variables | environment.WITHOUT_HAPROXY
    return variables | haproxy_environment(folder) | {BIND_VARIABLE: host} | environment.fallback_port(free_port())


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets the variables while the block runs, except the variables that the user has set."""
    own = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


def check_address(host: str, port: int) -> str:
    """Returns the address of `host`, a name or an address of this machine, if `port` is free on it. Raises ConfigError
    if there is no such host, RuntimeError if the port is unavailable."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"--host {host}: {address[0]} is no address of this machine") from error
            raise RuntimeError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return str(address[0])


def reachable_host(host: str) -> str:
    """Returns the host for a local client's URL to a server that listens on `host`."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def wait_for_health(url: str, deadline: float, poll_seconds: float) -> OSError | None:
    """Polls until every stage is ready: None then, or the last failure at `deadline` (`time.monotonic`)."""
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=_HEALTH_SECONDS):
                return None
        except OSError as error:
            if time.monotonic() >= deadline:
                return error
        time.sleep(poll_seconds)
