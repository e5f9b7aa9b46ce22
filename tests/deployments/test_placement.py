"""What machines lack for the replicas of an application, by all that they have and the settings reserve."""

from typing import Any

import pytest

from raylens.deployments.config import AppConfig
from raylens.deployments.placement import lacking

SMALL = {"CPU": 8.0}
WITH_GPU = {"CPU": 8.0, "GPU": 1.0}
ENCODER = {"CPU": 2.0, "GPU": 1.0, "encode_node": 100.0}


def missing(nodes: list[dict[str, float]], **settings: Any) -> dict[str, str]:
    return lacking(AppConfig.model_validate(settings), nodes, "this machine" if len(nodes) == 1 else "the cluster")


@pytest.mark.parametrize(
    ("nodes", "settings", "lacked"),
    [
        ([SMALL], {}, {}),
        ([SMALL], {"encode": {"num_gpus": 1}}, {"Encode": "1 GPU, and this machine has none"}),
        ([SMALL, SMALL], {"encode": {"num_gpus": 1}}, {"Encode": "1 GPU, and the cluster has none"}),
        ([SMALL, WITH_GPU], {"encode": {"num_gpus": 1}}, {}),
        ([WITH_GPU], {"encode": {"num_gpus": 0.5}, "generate": {"num_gpus": 0.5}}, {}),
        ([WITH_GPU], {"encode": {"num_gpus": 1, "placement": "inline"}}, {}),
        ([WITH_GPU], {"generate": {"num_gpus": 4}}, {"Generate": "4 GPU, and this machine has 1"}),
        ([WITH_GPU, SMALL], {"generate": {"num_gpus": 4}}, {"Generate": "4 GPU, and no node has more than 1"}),
        (
            [WITH_GPU],
            {"encode": {"num_gpus": 1}, "generate": {"num_gpus": 1}},
            dict.fromkeys(("Encode", "Generate"), "1 GPU, and this machine has 1 of the 2 that all stages take"),
        ),
        (
            [WITH_GPU],
            {"generate": {"num_gpus": 1, "tensor_parallel_size": 2}},
            {"Generate": "1 GPU, and this machine has 1 of the 2 that all stages take"},
        ),
        ([WITH_GPU, WITH_GPU], {"generate": {"num_gpus": 1, "tensor_parallel_size": 2}}, {}),
        ([SMALL, ENCODER], {"encode": {"resources": {"encode_node": 1}}}, {}),
        (
            [WITH_GPU, ENCODER],
            {"encode": {"num_cpus": 4, "resources": {"encode_node": 1}}},
            {"Encode": "4 CPU and 1 encode_node on one node"},
        ),
        ([SMALL], {"encode": {"min_replicas": 0, "num_gpus": 1}}, {"Encode": "1 GPU, and this machine has none"}),
        (
            [SMALL],
            {"further_models": [{"model": "other", "generate": {"num_gpus": 1}}]},
            {"Generate-other": "1 GPU, and this machine has none"},
        ),
    ],
)
def test_each_stage_without_a_place_is_told(
    nodes: list[dict[str, float]], settings: dict[str, Any], lacked: dict[str, str]
) -> None:
    assert missing(nodes, **settings) == lacked
