"""The environment in which Ray's processes run, on one machine and on every node of a cluster."""

# Ray's processes read these when they start. A reference that leaves Ray's sight would be pinned for ever, so Ray
# raises an error instead. Ray's own metrics reach its agents within seconds. HAProxy speaks HTTP instead of Ray's own
# proxy in Python, which would pickle every byte of a body.
RAY_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # no process imports modules from its working folder
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_allow_out_of_band_object_ref_serialization": "0",
    "RAY_max_direct_call_object_size": "262144",  # bytes of tensors that travel with a call, not by the object store
    "RAY_metrics_report_interval_ms": "4000",
    "RAY_worker_niceness": "0",  # Ray's 15 leaves no room below; stages that compute set their own
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # no code of a stage blocks its loop
    # A node is given up after five trials: one that refuses them after 5 s, one that is silent after 7.5 s, not 55 s.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "500",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # a dead HAProxy is replaced after three of these, not after 30 s
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "raylens.deployments.endpoint.request_headers:middlewares",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",  # Ray's 0.1 costs an idle controller as much as all it does otherwise
}
