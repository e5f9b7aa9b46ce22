"""The number of nodes that Ray has lost.

Ray 2.60: `ray.nodes()` has a number for the reason of a node's end, and the names of the numbers are private. Ray's own
`ray_node_failure_total` also counts nodes that were drained, stopped or scaled down.
Needed: the alert on a lost node is silent when a node ends as planned.
Test: `tests/dashboards/test_outages.py`.
Way back: a public name for the reason."""

import ray
from ray.core.generated.common_pb2 import NodeDeathInfo


def num_lost_nodes() -> int:
    """Returns the number of the cluster's nodes that ended without a drain or a signal to stop. Waits for the GCS."""
    return sum(
        not node["Alive"] and node["DeathReason"] == NodeDeathInfo.UNEXPECTED_TERMINATION for node in ray.nodes()
    )
