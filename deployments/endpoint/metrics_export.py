"""Merges the metrics of all nodes, read from each node's exporter, into one page."""

import asyncio
import logging
import re

import aiohttp
import ray

from raylens.deployments.metrics.exporter import ADDRESS_FILE
from raylens.deployments.metrics.recording import metrics_folder

_TIMEOUT_SECONDS = 5.0
_ATTEMPTS = 4
_PAUSE_SECONDS = 0.5  # between two attempts: a restarting exporter does not listen
_HEADER = re.compile(r"^# HELP (\w+) ", re.MULTILINE)

logger = logging.getLogger(f"ray.serve.{__name__}")


async def export_metrics(port: int) -> bytes:
    """Returns the metrics of every node in Prometheus' text format. `port`: the port of the other nodes' exporters."""
    nodes = await asyncio.to_thread(ray.nodes)
    own = ray.util.get_node_ip_address()
    others = {node["NodeManagerAddress"] for node in nodes if node["Alive"]} - {own}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        pages = await asyncio.gather(_read_own(session), *(_read(session, f"{host}:{port}") for host in others))
    return merged_pages([page for page in pages if page]).encode()


def merged_pages(pages: list[str]) -> str:
    """Merges the pages. Prometheus requires all samples of a metric in one group."""
    if len(pages) == 1:
        return pages[0]
    metrics: dict[str, list[str]] = {}
    for page in pages:
        starts = [(match.start(), match[1]) for match in _HEADER.finditer(page)]
        ends = [start for start, _ in starts[1:]] + [len(page)]
        for (start, name), end in zip(starts, ends, strict=True):
            head, kind, *samples = page[start:end].splitlines(keepends=True)
            metrics.setdefault(name, [head, kind]).extend(samples)
    return "".join(line for lines in metrics.values() for line in lines)


async def _read_own(session: aiohttp.ClientSession) -> str:
    """Returns the page of this node's exporter, which may be restarting."""
    file = metrics_folder() / ADDRESS_FILE
    for _ in range(_ATTEMPTS):
        if file.exists() and (page := await _read(session, file.read_text())):
            return page
        await asyncio.sleep(_PAUSE_SECONDS)
    return ""


async def _read(session: aiohttp.ClientSession, address: str) -> str:
    """Returns the page, or an empty one without an exporter: a node without a replica has none."""
    try:
        async with session.get(f"http://{address}/metrics") as response:
            response.raise_for_status()
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        logger.debug("no metrics from %s: %s", address, type(error).__name__)
        return ""
