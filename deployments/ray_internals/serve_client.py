"""Three calls of Ray Serve's controller that `ray.serve` lacks.

Ray 2.60: the controller's client is private. `serve.run` gives each deployment a new version, which restarts all
replicas. Only the dashboard deploys a config file. `serve.start` keeps the options of a running Ray Serve and does not
report them. `serve.delete` polls once a second, and never looks at the answer to its order: if that is an error, Ray
writes "Unhandled error" to standard error.
Needed: `raylens deploy` sends a config file without a dashboard, and refuses options that Ray Serve would not change.
`raylens serve` ends with the last replica, and not a second later.
Test: `tests/deployments/ray_internals/test_on_ray.py`, `test_the_client_tells_options_and_deletes_without_waiting`;
`tests/deployments/test_cluster_deploy.py` deploys.
Way back: `serve.deploy(schema)` (ray-project/ray#22648 left the dashboard only), the HTTP options in `serve.status()`,
and a `serve.delete` that returns or raises the controller's answer."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.schema import ServeDeploySchema


def running_http_options() -> Any:
    """Returns the HTTP options of this cluster's running Ray Serve; None if none runs."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config


def deploy_file(wanted: "ServeDeploySchema") -> None:
    """Sends a config file to the running Ray Serve. Raises RayTaskError if Ray Serve refuses it."""
    from ray.serve.context import _get_global_client

    _get_global_client().deploy_apps(wanted)


def begin_deletion(application: str) -> None:
    """Makes Ray Serve delete the application; returns once it has begun. Raises RayError if it cannot."""
    import ray
    from ray.serve.context import _get_global_client

    ray.get(_get_global_client()._controller.delete_apps.remote([application]))
