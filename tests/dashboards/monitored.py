"""The application under a load that is counted, with Prometheus reading it."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from openai import OpenAI
from ray._private import ray_constants

from dashboards.prometheus_api import PrometheusApi, for_all
from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig
from raylens.deployments.endpoint.api_keys import hash_key
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import deployed_app, local_ray
from tests.dashboards.counted_load import Counts, send_everything
from tests.dashboards.prometheus_server import (
    SCRAPE_SECONDS,
    agent_addresses,
    api_config,
    cluster_config,
    forget,
    prometheus,
    wait_for_alert,
)
from tests.waiting import wait_until

_DASHBOARD = Path(__file__).parents[2] / "dashboards" / "raylens.json"
PANELS: list[dict[str, Any]] = [
    panel for panel in json.loads(_DASHBOARD.read_text())["panels"] if panel["type"] != "row"
]
_KEY = "rl-of-the-tests"
STORE_BYTES = 100 * 2**20
ROOM = 32  # requests in work
EMBEDDING_BYTES = 40_000  # one picture's embeddings, not those of two
KV_CACHE_BYTES = 2**22  # the positions of one context, 2048
_WINDOW = 300  # seconds, more than there are
_SCRAPES = SCRAPE_SECONDS + 0.5
"""Seconds until Prometheus has surely seen what has happened."""


@dataclass(frozen=True)
class Monitored:
    """The application after the load, the Prometheus that saw it, and what the client counted. `impatient` is a second
    Prometheus, whose alerts fire at once. `outside` is a third one, which reaches only the API. The load began at
    `began`, and all of it had been seen at `time`, both in seconds since 1970."""

    prometheus: PrometheusApi
    impatient: PrometheusApi
    outside: PrometheusApi
    client: OpenAI
    counts: Counts
    began: float
    time: float

    def shown(self, title: str, target: int = 0) -> dict[str, float]:
        """What a panel shows: the value of each series by its name in the legend."""
        (panel,) = [panel for panel in PANELS if panel["title"] == title]
        query = panel["targets"][target]
        found = {}
        for series in self.prometheus.at(for_all(query["expr"], f"{_WINDOW}s"), self.time):
            name = query["legendFormat"]
            for label, value in series.labels.items():
                name = name.replace(f"{{{{{label}}}}}", value)
            found[name] = series.value
        return found

    def total(self, title: str, target: int = 0) -> Any:
        """The same of a panel of rates, as numbers since the start, without what there was none of."""
        totals = {name: value * self._seconds for name, value in self.shown(title, target).items() if value}
        return pytest.approx(totals, rel=1e-6)

    @property
    def _seconds(self) -> float:
        """What makes a number of a rate. Prometheus' rates reach somewhat beyond the first and the last value, by the
        same share in all series that begin at 0."""
        (number,) = self.prometheus.at("sum(raylens_engine_steps_total)", self.time)
        (rate,) = self.prometheus.at(f"sum(rate(raylens_engine_steps_total[{_WINDOW}s]))", self.time)
        return number.value / rate.value

    def wait_for_alert(self, name: str, **labels: str) -> None:
        wait_for_alert(self.impatient, name, 30, **labels)


@contextmanager
def monitored_application(folder: Path) -> Iterator[Monitored]:
    """Starts Ray, the application and three Prometheus, and sends the load. `folder` is for what they write."""
    port, exporter_port = free_port(), free_port()
    patient, impatient, outside = (folder / name for name in ("patient", "impatient", "outside"))
    for one in (patient, impatient, outside):
        one.mkdir()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.dict("os.environ", RAY_metrics_report_interval_ms="1000"))
        enter(mock.patch.object(ray_constants, "DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", STORE_BYTES))
        enter(local_ray(host="127.0.0.1", port=port, num_cpus=8))
        # Prometheus looks for its targets every five seconds only, and does it while the application starts.
        inside = cluster_config(patient, exporter=f"127.0.0.1:{exporter_port}", agents=agent_addresses())
        of_cluster = enter(prometheus(patient, inside))
        at_once = enter(prometheus(impatient, inside, alerts_wait=False))
        of_api = enter(prometheus(outside, api_config(outside, port=port, key=_KEY)))
        url = enter(deployed_app(_config(folder, exporter_port), host="127.0.0.1", port=port))
        # The series of one stage began before those of another. Now all of them begin at the same time.
        for api in (of_cluster, at_once, of_api):
            forget(api)
        for api in (of_cluster, at_once):
            _wait_for_scrapes(api, "ray_object_store_used_memory")  # Ray's agent begins late on a busy machine
        for api in (of_cluster, at_once, of_api):
            _wait_for_scrapes(api, "raylens_build_info")
        client = OpenAI(base_url=f"{url}/v1", api_key=_KEY, max_retries=0, timeout=60)
        counts = Counts()
        began = time.time()
        send_everything(client, counts)
        time.sleep(_SCRAPES)
        yield Monitored(of_cluster, at_once, of_api, client, counts, began, time.time())


def _config(folder: Path, exporter_port: int) -> AppConfig:
    keys = folder / "keys.yaml"
    keys.write_text(yaml.safe_dump([{"name": "tests", "sha256": hash_key(_KEY), "admin": True}]))
    room = {"requests": ROOM, "bytes": 2**26, "pixels": 2**28, "tokens": 2**20}
    return AppConfig.model_validate(
        {
            "model": str(BUNDLED_MODEL),
            "auth": {"keys_file": str(keys)},
            "media": {"fetch": {"allow_private_addresses": True}},
            "metrics": {"port": exporter_port, "slo_time_to_first_token_s": 60, "slo_time_per_output_token_s": 60},
            "shared": {"embedding_cache_bytes": EMBEDDING_BYTES},
            "admission": {"total": room, "per_key": room, "max_queued_requests": 2},
            "ingress": {"away_timeout_s": 0.5},
            "preprocess": {"min_replicas": 2, "num_cpus": 0.5},
            "generate": {"engine": {"kv_cache_bytes": KV_CACHE_BYTES}},
        }
    )


def _wait_for_scrapes(api: PrometheusApi, series: str) -> None:
    """Prometheus has to have seen the zeros before anything is counted."""
    seen = f"count_over_time({series}[1m])"
    wait_until(lambda: any(one.value >= 2 for one in api.at(seen)), 60)
