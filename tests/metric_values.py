"""What the endpoint's /metrics says."""

import time
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

LATENESS_SECONDS = 0.7
"""How old what /metrics says may be: replicas tell twice a second what they have not counted at once."""


def samples(url: str, name: str | None = None, headers: Mapping[str, str] | None = None) -> list[Sample]:
    """The samples of this name without its prefix, or all."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", headers=headers, timeout=30).text)
    return [one for family in families for one in family.samples if name is None or one.name == f"raylens_{name}"]


def exported(url: str, name: str, headers: Mapping[str, str] | None = None, **labels: str) -> float:
    """The sum of a counter over all processes that count it; waits for as long as it may be late."""
    time.sleep(LATENESS_SECONDS)
    found = samples(url, f"{name.removesuffix('_total')}_total", headers)
    return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


def gauge(url: str, name: str) -> float:
    """The sum of a gauge over all processes that have set it."""
    return sum(sample.value for sample in samples(url, name))
