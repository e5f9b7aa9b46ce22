"""What the endpoint's /metrics says."""

import time
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

LATENESS_SECONDS = 0.7
"""How old what /metrics says may be: replicas tell twice a second what they have not counted at once."""


def exported(url: str, name: str, headers: Mapping[str, str] | None = None, **labels: str) -> float:
    """The sum of a counter over all processes that count it; waits for as long as it may be late."""
    time.sleep(LATENESS_SECONDS)
    total = f"raylens_{name.removesuffix('_total')}_total"
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", headers=headers).text)
    samples = [sample for family in families for sample in family.samples if sample.name == total]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def gauge(url: str, name: str) -> float:
    """The sum of a gauge over all processes that have set it."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    values: list[float] = [one.value for family in families for one in family.samples if one.name == f"raylens_{name}"]
    return sum(values)
