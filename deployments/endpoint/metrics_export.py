"""The metrics of all replicas as one page, read from the agents that Ray runs on every node."""

import asyncio
import logging
import re

import aiohttp
import ray
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from deployments.metrics import PREFIX

_RAY_PREFIX = "ray_"
_OWN = re.compile(rf"(# (HELP|TYPE) )?{_RAY_PREFIX}{PREFIX}")
_TIMEOUT_SECONDS = 5.0

logger = logging.getLogger(f"ray.serve.{__name__}")


class _Page(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def export_metrics() -> bytes:
    """Returns this application's metrics from every node, in Prometheus' text format, without Ray's prefix."""
    nodes = await asyncio.to_thread(ray.nodes)
    urls = [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes if node["Alive"]
    ]
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        pages = await asyncio.gather(*(_read(session, url) for url in urls))
    return render_page(merge_pages(pages))


def render_page(families: list[Metric]) -> bytes:
    """Returns Prometheus' text format of `families`."""
    registry = CollectorRegistry()
    registry.register(_Page(families))
    return generate_latest(registry)


def merge_pages(pages: list[str]) -> list[Metric]:
    """Returns the application's metric families on several nodes' pages, with the samples of one family together."""
    families: dict[str, Metric] = {}
    for page in pages:
        own = "\n".join(line.replace(_RAY_PREFIX, "", 1) for line in page.splitlines() if _OWN.match(line))
        for family in text_string_to_metric_families(own + "\n"):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type)).samples.extend(
                family.samples
            )
    return list(families.values())


async def _read(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        logger.warning("no metrics from %s: %s", url, type(error).__name__)
        return ""
