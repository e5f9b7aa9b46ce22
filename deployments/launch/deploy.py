"""`raylens deploy`: sends a Serve config file to the Ray cluster of this node, and waits until every stage is ready."""

import ipaddress
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from raylens.deployments.cluster.ray_session import joined_cluster
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.config_file import ConfigError, load_config
from raylens.deployments.launch.local_cluster import print_at_once, reachable_host, wait_for_health
from raylens.deployments.launch.rollout import stage_lines, why_failed
from raylens.deployments.placement import lacking
from raylens.deployments.ray_internals.serve_client import deploy_file, running_http_options

if TYPE_CHECKING:
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

_POLL_SECONDS = 0.5


def deploy(
    path: Path, *, host: str | None, timeout_s: float | None, say: Callable[[str], None] = print_at_once
) -> None:
    """Deploys the application of a Serve config file, in place of the cluster's current one. Returns when every stage
    is ready and the endpoint answers; `say` gets a line for each change until then. `host`: the listen address instead
    of the file's. `timeout_s`: longest wait in seconds; None: no wait. Raises ConfigError, before anything is sent, if
    the file cannot work on this cluster; RuntimeError without a cluster, if a stage does not start, or at the limit."""
    wanted = read_serve_file(path, host)
    with joined_cluster():
        import ray

        num_nodes = sum(node["Alive"] for node in ray.nodes())
        check_host(wanted.http_options.host, num_nodes)
        known = _send(wanted)
        say(f"{path}: sent to the cluster, which has {num_nodes} node{'s' if num_nodes > 1 else ''}")
        if timeout_s is None:
            return
        started = time.monotonic()
        _wait_for_stages(wanted.applications[0], known, started + timeout_s, say)
        _wait_for_endpoint(wanted, started + timeout_s)
        say(f"every stage is ready after {time.monotonic() - started:.0f} s")


def read_serve_file(path: Path, host: str | None) -> "ServeDeploySchema":
    """Returns the configuration for Ray Serve, with absolute paths in the settings. Raises ConfigError for an unknown
    or wrong field, in our part of the file or in Ray Serve's."""
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    config = load_config(path, {})
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    (application,) = document["applications"]
    options = document.setdefault("http_options", {})
    _check_names(f"{path}: ", document, ServeDeploySchema)
    _check_names(f"{path}: http_options.", options, HTTPOptionsSchema)
    _check_names(f"{path}: applications.0.", application, ServeApplicationSchema)
    application["args"] = config.model_dump(mode="json", exclude_unset=True)
    if host is not None:
        options["host"] = host
    try:
        return ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise ConfigError(f"{path}: {'; '.join(problems)}") from error


def _check_names(prefix: str, section: Mapping[str, Any], fields: type[BaseModel]) -> None:
    """Raises ConfigError for an unknown field, which Ray Serve would ignore."""
    if unknown := sorted(set(section) - set(fields.model_fields)):
        known = sorted(fields.model_fields)
        raise ConfigError(f"{prefix}{unknown[0]}: Ray Serve has no such field, only {known}")


def check_host(host: str, num_nodes: int) -> None:
    """Raises ConfigError for a loopback address if the cluster has other nodes. Replicas would listen on it, too, and
    other nodes' HAProxy would send all requests through Ray's own, slower proxy."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host.lower().rstrip(".") == "localhost"
    if num_nodes > 1 and is_loopback:
        raise ConfigError(
            f"http_options.host: {host} cannot be reached from the other nodes of this cluster, which has {num_nodes}:"
            " take 0.0.0.0, in the file or as --host 0.0.0.0"
        )


def _send(wanted: "ServeDeploySchema") -> set[str]:
    """Starts Ray Serve unless it runs, and deploys. Returns the names of the stages that existed before."""
    from ray import serve
    from ray.exceptions import RayTaskError

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    http_options = wanted.http_options.model_dump()
    if (running := running_http_options()) is not None:
        _check_unchanged(http_options, running)
    serve.start(
        proxy_location=wanted.proxy_location,
        http_options=http_options,
        grpc_options=wanted.grpc_options.model_dump(),
        logging_config=wanted.logging_config,
        controller_options=wanted.controller_options,
    )
    before = serve.status().applications.get(wanted.applications[0].name)
    try:
        deploy_file(wanted)
    except RayTaskError as error:
        raise RuntimeError(f"Ray Serve does not take the application: {error.cause}") from error
    return set() if before is None else set(before.deployments)


def _check_unchanged(wanted: Mapping[str, Any], running: Any) -> None:
    for name, value in wanted.items():
        if (kept := getattr(running, name)) != value:
            raise ConfigError(
                f"http_options.{name}: {value!r} takes a new start of Ray Serve, which runs with {kept!r} on this"
                " cluster: run `serve shutdown`, which ends the application, and deploy again"
            )


def _wait_for_stages(
    application: "ServeApplicationSchema", known: set[str], deadline: float, say: Callable[[str], None]
) -> None:
    import ray
    from ray import serve

    config = AppConfig.model_validate(application.args)
    told: dict[str, str] = {}
    while True:
        status = serve.status().applications[application.name]
        missing = lacking(config, [node["Resources"] for node in ray.nodes() if node["Alive"]], "the cluster")
        for name, line in stage_lines(status, known=known, missing=missing).items():
            if told.get(name) != line:
                say(line)
                told[name] = line
        if status.status == "RUNNING":
            return
        if status.status == "DEPLOY_FAILED":
            raise RuntimeError(why_failed(status))
        if time.monotonic() >= deadline:
            late = [line for line in told.values() if ": ready" not in line] or ["the application is still being built"]
            raise RuntimeError(f"the time is over, and the deployment goes on: {'; '.join(late)}")
        time.sleep(_POLL_SECONDS)


def _wait_for_endpoint(wanted: "ServeDeploySchema", deadline: float) -> None:
    """Polls the endpoint on this node, if there is one, until all stages are ready."""
    import ray
    from ray import serve

    if ray.get_runtime_context().get_node_id() not in serve.status().proxies:
        return
    options = wanted.http_options
    url = f"http://{reachable_host(options.host)}:{options.port}"
    if (failure := wait_for_health(url, deadline, _POLL_SECONDS)) is not None:
        raise RuntimeError(f"every stage is ready, but {url}/health does not answer: {failure}") from failure
