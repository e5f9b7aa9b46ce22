"""The environment of Ray's processes, on one machine and on every node of a cluster.

Ray 2.60: the raylet, the GCS server, the agents and Ray Serve read variables when they start. Most are undocumented:
those in lower case override the constants of `ray_config_def.h`, the others are constants of Python modules.
Needed: each entry says why.
Test: `tests/deployments/ray_internals/test_environment.py` looks for each name where Ray reads it.
Way back: public options of `ray.init`, `ray start` and `serve.start`."""

from pathlib import Path

RAY_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # no process imports modules from its working folder
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # Ray's own proxy in Python would pickle every byte of a body
    "RAY_allow_out_of_band_object_ref_serialization": "0",  # see references.py
    "RAY_max_direct_call_object_size": "262144",  # bytes; larger tensors travel by the object store
    "RAY_metrics_report_interval_ms": "4000",  # Ray's own metrics reach its agents within seconds
    "RAY_worker_niceness": "0",  # Ray's 15 leaves no room below it; computing stages set their own
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # no stage blocks its event loop
    # Ray gives up a node after five trials: 5 s if it refuses them, 7.5 s if it is silent, not 55 s.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "500",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # Ray replaces a dead HAProxy after three periods, not after 30 s
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",  # Ray's 5 end a proxy that starts late because others compute
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "raylens.deployments.endpoint.request_headers:middlewares",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # Ray's 0.1 doubles the cost of an idle controller
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",  # Ray's 100 wakes each replica, and each handle in it, all the time
    "RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR": "0.5",  # of a second, see routing/work_scaling.py
}

ONE_MACHINE = {
    # Ray repeats these more often, even when idle. One machine has no network that could fall silent.
    "RAY_memory_monitor_refresh_ms": "1000",
    "REPORTER_UPDATE_INTERVAL_MS": "10000",
    "RAY_DASHBOARD_AGENT_CHECK_PARENT_INTERVAL_S": "2",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on loopback, as on systems other than Linux
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",  # a stage fails at once: retries find another node in a cluster only
}
"""Additions to and replacements of RAY_ENVIRONMENT on one machine."""
WITHOUT_DASHBOARD = {"RAY_task_events_report_interval_ms": "0"}  # Ray sends the events of each call to its dashboard
WITHOUT_HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}


def draining(seconds: float) -> dict[str, str]:
    """Grace period: a stopping replica of the ingress keeps serving this long, so that HAProxy hears of it."""
    return {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{seconds:g}"}


def fallback_port(port: int) -> dict[str, str]:
    """The port of Ray's own proxy behind HAProxy."""
    return {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(port)}


def head_storage(folder: Path) -> dict[str, str]:
    """The head node keeps the cluster's state in `folder`, from which a restarted head continues."""
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder)}
