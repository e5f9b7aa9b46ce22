"""A real Prometheus reads a real application under load: every panel and every rule has data, panels say what the
client has counted, and alerts fire when the application is harmed."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import ray
from openai import APIError, OpenAI
from ray import serve

from dashboards.prometheus_api import for_all
from dashboards.render import TimeRange, picture
from raylens.deployments.launch.local_cluster import APP_NAME
from tests.dashboards.counted_load import Counts, LongAnswers, pictures
from tests.dashboards.monitored import EMBEDDING_BYTES, PANELS, ROOM, STORE_BYTES, Monitored, monitored_application
from tests.dashboards.prometheus_server import cluster_config, targets
from tests.pictures import disc, encoded, user_message
from tests.replicas import children, replica_pids, stopped
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    with monitored_application(tmp_path_factory.mktemp("monitored")) as running:
        yield running


def test_a_node_with_several_addresses_in_rays_file_has_one_exporter(tmp_path: Path) -> None:
    """The file has the head's agent, its dashboard and its autoscaler."""
    agents = [f"127.0.0.1:{number}" for number in (1001, 1002, 1003)]
    config = cluster_config(tmp_path, exporter="127.0.0.1:8081", agents=agents)
    assert targets(tmp_path, config, "raylens") == {"127.0.0.1:8081"}
    assert targets(tmp_path, config, "ray") == set(agents)


def test_every_expression_of_the_dashboard_has_data(monitored: Monitored) -> None:
    missing = [
        f"{panel['title']}: {target['expr']}"
        for panel in PANELS
        for target in panel["targets"]
        if not any(
            one.value == one.value for one in monitored.prometheus.at(for_all(target["expr"], "2m"), monitored.time)
        )
    ]
    assert missing == []


def test_every_recording_rule_has_data_and_no_rule_fails(monitored: Monitored) -> None:
    groups = httpx.get(f"{monitored.prometheus.url}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 38
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    for rule in rules:
        if rule["type"] == "recording":
            assert any(one.value == one.value for one in monitored.prometheus.at(rule["name"])), rule["name"]


def test_each_job_reads_what_it_is_for(monitored: Monitored) -> None:
    up = monitored.prometheus.at("max_over_time(up[1m])")  # Ray's agent is late now and then on a busy machine
    assert sorted((one.labels["job"], one.value) for one in up) == [("ray", 1.0), ("raylens", 1.0)]
    up = monitored.outside.at("up")
    assert [(one.labels["job"], one.value) for one in up] == [("raylens-api", 1.0)]


def test_the_api_has_the_same_series_with_the_same_values(monitored: Monitored) -> None:
    found = [
        {
            frozenset(
                (label, value) for label, value in one.labels.items() if label not in ("instance", "job")
            ): one.value
            for one in api.at('{__name__=~"raylens_.+(_total|_count|_sum|_bucket)",__name__!~".*engine.*"}')
        }
        for api in (monitored.prometheus, monitored.outside)
    ]
    assert len(found[0]) > 300
    assert found[0] == found[1]


def test_running_replicas_are_those_that_ray_serve_has(monitored: Monitored) -> None:
    deployments = serve.status().applications[APP_NAME].deployments
    running = {name: float(state.replica_states["RUNNING"]) for name, state in deployments.items()}
    assert running["Preprocess"] == 2
    assert monitored.shown("Running") == running
    assert monitored.shown("Running", 1) == {f"{name} wanted": number for name, number in running.items()}
    assert sum(monitored.shown("Software").values()) == sum(running.values())


def test_requests_and_tokens_are_those_of_the_client(monitored: Monitored) -> None:
    counts = monitored.counts
    assert min(counts.answered["length"], counts.cached_tokens) > 10
    assert monitored.total("Requests answered") == counts.answered
    assert monitored.total("Goodput", 1) == {"all": counts.answered.total()}
    assert monitored.shown("Share as fast as promised") == {"within the objectives": pytest.approx(1.0)}
    for target, (name, number) in enumerate(
        (
            ("generated", counts.generated_tokens),
            ("prompt", counts.prompt_tokens),
            ("prompt, from the prefix cache", counts.cached_tokens),
        )
    ):
        assert monitored.total("Tokens", target) == {f"shapes {name}": number}


def test_requests_and_tokens_of_a_key_are_those_of_the_client(monitored: Monitored) -> None:
    counts = monitored.counts
    begun = counts.answered.total() + counts.errors["invalid_image"]
    assert monitored.total("API keys", 0) == {"tests requests": begun}
    assert monitored.total("API keys", 1) == {"tests prompt tokens": counts.prompt_tokens}
    assert monitored.total("API keys", 2) == {"tests generated tokens": counts.generated_tokens}


def test_raw_counters_are_exactly_those_of_the_client(monitored: Monitored) -> None:
    counts = monitored.counts
    for series, number in (
        ("request_success_total", counts.answered.total()),
        ("time_to_first_token_seconds_count", counts.answered.total()),
        ("e2e_request_latency_seconds_count", counts.answered.total()),
        ("request_prompt_tokens_sum", counts.prompt_tokens),
        ("request_generation_tokens_sum", counts.generated_tokens),
        ("request_errors_total", counts.errors.total()),
        ("mm_media_download_bytes_total", counts.downloaded_bytes),
    ):
        assert [one.value for one in monitored.prometheus.at(f"sum(raylens_{series})")] == [number], series


def test_errors_are_shown_by_their_codes_from_the_first_one_on(monitored: Monitored) -> None:
    errors = monitored.counts.errors
    assert errors == Counter(invalid_value=3, invalid_image=1)
    assert monitored.total("Errors", 1) == {f"ingress {code}": number for code, number in errors.items()}
    assert monitored.shown("Error ratio") == {"failed": 0.0}, "it is the clients who were wrong"


def test_hits_of_both_caches_are_those_that_the_order_of_pictures_makes(monitored: Monitored) -> None:
    """The second picture is the first again: its embeddings are there. The fourth is, too, but another one has taken
    their place, so only the processed picture is there. One more picture comes from a URL, and one that is none is not
    looked up."""
    asked = len(pictures()) + 1
    assert monitored.counts.items == asked
    assert monitored.shown("Hit rate", 0) == pytest.approx({"processed image": 1 / (asked - 1)})
    assert monitored.shown("Hit rate", 1) == pytest.approx({"embeddings image": 1 / asked})
    assert monitored.total("Media items") == {"image": asked}
    assert monitored.total("Evictions", 1) == {"embeddings image": asked - 2}
    assert monitored.total("Items processed") == {"image ok": asked - 2, "image error": 1}
    assert monitored.total("Items encoded") == {"image ok": asked - 1}
    assert monitored.shown("Size", 3) == {"embeddings at most": EMBEDDING_BYTES}
    assert 0 < monitored.shown("Size", 1)["embeddings"] <= EMBEDDING_BYTES


def test_media_and_files_are_counted(monitored: Monitored) -> None:
    assert monitored.total("Media fetched") == {"from URLs": monitored.counts.downloaded_bytes}
    assert monitored.shown("Uploaded files") == {"Shared-0": 1.0}
    assert monitored.shown("Size of uploaded files") == {"Shared-0": monitored.counts.uploaded_bytes}


def test_the_picture_has_every_panel_with_its_lines(monitored: Monitored) -> None:
    span = TimeRange(monitored.began, monitored.time, "10s")
    drawn = {axes.get_title(loc="left"): axes for axes in picture(monitored.prometheus, [], span).axes}
    assert drawn.keys() == {panel["title"] for panel in PANELS}
    assert [title for title, axes in drawn.items() if axes.get_legend() is None] == []
    (row,) = picture(monitored.prometheus, ["Stage waterfall"], span).axes[:1]
    names = [text.get_text() for text in row.get_legend().get_texts()]  # type: ignore[union-attr]
    assert names[:2] == ["admission_queue", "media_fetch"]
    with pytest.raises(ValueError, match="no row 'Weather'"):
        picture(monitored.prometheus, ["Weather"], span)


def test_nothing_fires_under_load_but_a_cache_that_is_too_small(monitored: Monitored) -> None:
    # On a busy machine first tokens are late.
    others = 'ALERTS{alertstate="firing",alertname!="RaylensLateFirstTokensBurnBudget"}'
    firing = monitored.impatient.at(others, monitored.time)
    assert [(one.labels["alertname"], one.labels.get("cache")) for one in firing] == [
        ("RaylensCacheThrashes", "embeddings")
    ], firing
    assert monitored.prometheus.at('ALERTS{alertstate="firing"}', monitored.time) == []


@pytest.mark.slow
def test_alerts_fire_when_first_tokens_come_late_and_requests_are_refused(monitored: Monitored) -> None:
    counts = Counts()
    (generate,) = replica_pids("Generate")
    with stopped(generate):
        threads = counts.ask_at_once(monitored.client, ROOM + 8)
        time.sleep(4)
    _join(threads)
    assert counts.errors == {"overloaded_queue": 6}
    monitored.wait_for_alert("RaylensRefusesRequests", reason="queue")
    monitored.wait_for_alert("RaylensLateFirstTokensBurnBudget", severity="page")
    (refused,) = monitored.prometheus.at('sum(raylens_admission_rejections_total{reason="queue"})')
    assert refused.value == counts.errors.total()


@pytest.mark.slow
def test_alerts_fire_when_the_kv_cache_has_no_room_for_all_answers(monitored: Monitored) -> None:
    """Those that find no room wait, and with each further client one more."""
    with LongAnswers(monitored.client, ROOM, interval_s=0.4):
        monitored.wait_for_alert("RaylensKvCacheFull")
        monitored.wait_for_alert("RaylensQueueGrows")
    assert (
        monitored.prometheus.at('ALERTS{alertname=~"RaylensKvCacheFull|RaylensQueueGrows",alertstate="firing"}') == []
    )


def test_alerts_fire_when_a_stage_hangs(monitored: Monitored) -> None:
    counts = Counts()
    (generate,) = replica_pids("Generate")
    os.kill(generate, signal.SIGSTOP)
    try:
        monitored.wait_for_alert("RaylensHeartbeatStale", stage="generate")
        monitored.wait_for_alert("RaylensStageNotReady", stage="generate")
        _join(counts.ask_at_once(monitored.client, 30))
    finally:
        os.kill(generate, signal.SIGKILL)
    assert counts.errors == {"stage_unavailable": 30}
    monitored.wait_for_alert("RaylensErrorsBurnBudget", severity="page")


@pytest.mark.slow
def test_an_alert_fires_when_a_replica_dies_again_and_again(monitored: Monitored) -> None:
    for number in range(1, 4):
        (encode,) = replica_pids("Encode")
        os.kill(encode, signal.SIGKILL)
        # Ray Serve would give up on a replica that dies again and again before it has started.
        wait_until(partial(_is_encoded, monitored.client, encoded(disc("red", (96, 200 + number), (36, 36)))), 60)
        started = f'sum(raylens_replica_starts_total{{deployment="Encode"}}) == {1 + number}'
        wait_until(lambda started=started: bool(monitored.impatient.at(started)))  # type: ignore[misc]
    monitored.wait_for_alert("RaylensReplicasFlap", deployment="Encode")


def _is_encoded(client: OpenAI, picture: bytes) -> bool:
    try:
        client.chat.completions.create(model="shapes", messages=[user_message("What is it?", picture)], max_tokens=1)
    except APIError:
        return False
    return True


@pytest.mark.slow
def test_an_alert_fires_when_the_object_store_spills(monitored: Monitored) -> None:
    held = [ray.put(np.zeros(STORE_BYTES // 4, np.uint8)) for _ in range(6)]
    monitored.wait_for_alert("RaylensObjectStoreSpills")
    del held


def test_an_alert_fires_when_a_node_gives_no_metrics(monitored: Monitored) -> None:
    with stopped(_exporter_pid()):
        monitored.wait_for_alert("RaylensNodeNotScraped", job="raylens")


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)


def _exporter_pid() -> int:
    """Of the process that a replica of this node keeps."""
    names = ("Ingress", "Shared-0", "Preprocess", "Encode", "Generate")
    (pid,) = [
        child
        for name in names
        for replica in replica_pids(name)
        for child in children(replica)
        if "exporter.py" in Path(f"/proc/{child}/cmdline").read_text()
    ]
    return pid
