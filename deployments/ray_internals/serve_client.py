"""Three calls of Ray Serve's controller that `ray.serve` lacks.

Ray 2.60: the client of the controller is private. `serve.run` deploys what it builds in this process, with a new
version each time, which restarts all replicas. Only the dashboard deploys a config file. `serve.start` keeps the
options of a Ray Serve that runs, and does not tell them. `serve.delete` waits, and looks once a second;
`_blocking=False` returns at once.

Needed: `raylens deploy` sends a config file without a dashboard, and refuses options that would be kept as they are.
`raylens serve` ends when the last replica has ended, and not a second later.

Test: `tests/deployments/ray_internals/test_on_ray.py`, `test_the_client_tells_options_and_deletes_without_waiting`;
`tests/deployments/test_cluster_deploy.py` deploys.

Way back: `serve.deploy(schema)`, the HTTP options in `serve.status()`, and a public `blocking` of `serve.delete`.
ray-project/ray#22648 made the dashboard's API the only way for a config file."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema


def running_http_options() -> Any:
    """Returns the HTTP options of the Ray Serve that runs on this cluster; None if none runs."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config


def deploy_file(wanted: "ServeDeploySchema") -> None:
    """Sends a config file to the running Ray Serve. Raises RayTaskError if it does not take the file."""
    from ray.serve.context import _get_global_client

    _get_global_client().deploy_apps(wanted)


def begin_deletion(application: str) -> None:
    """Has Ray Serve delete the application, and does not wait for its end."""
    from ray import serve

    serve.delete(application, _blocking=False)
