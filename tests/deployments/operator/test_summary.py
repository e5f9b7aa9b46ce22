"""Two pages of metrics become the figures that people read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from raylens.deployments.metrics.instruments import PREFIX
from raylens.deployments.operator.metrics_page import Labels, MetricsPage
from raylens.deployments.operator.snapshot import Budget, KeyUse, Snapshot, Stage
from raylens.deployments.operator.summarize import RecentPages, summarize
from tests.defined_metrics import defined, exported_names
from tests.metric_pages import START, Series, histogram, page

ALICE = 'Ingress:api_key_{}_total{{api_key="alice"}}'
STOP = 'Ingress:request_success_total{model="shapes",finished_reason="stop"}'
SLO = 'Ingress:requests_within_slo_total{model="shapes"}'


def read(series: Series, node: str = "10.0.0.1") -> MetricsPage:
    return MetricsPage.of_text(page(series, node))


def later(**changes: float) -> dict[str, float]:
    """The page of `START`, with other values of the series that `NAMES` gives short names."""
    return {**START, **{NAMES[name]: START[NAMES[name]] + growth for name, growth in changes.items()}}


NAMES = {
    "ended": STOP,
    "within": SLO,
    "refused": 'Ingress:admission_rejections_total{reason="queue"}',
    "generated": 'Ingress:generation_tokens_total{model="shapes"}',
    "prompt": 'Ingress:prompt_tokens_total{model="shapes"}',
    "alice_requests": ALICE.format("requests"),
    "alice_prompt": ALICE.format("prompt_tokens"),
    "alice_generated": ALICE.format("generation_tokens"),
    "mm_queries": 'Shared-0:mm_cache_queries_total{modality="image"}',
    "mm_hits": 'Shared-0:mm_cache_hits_total{modality="image"}',
    "prefix_queries": "Generate:prefix_cache_queries_total",
    "prefix_hits": "Generate:prefix_cache_hits_total",
    "encoded": 'Generate:encoder_items_total{modality="image",status="ok"}',
    "decoded": "Generate:engine_decoded_sequences_total",
    "guessed": "Generate:spec_decode_num_accepted_tokens_total",
}


def seen(series: Series, seconds: float = 2.0) -> Snapshot:
    return summarize(read(START), read(series), seconds)


def test_requests_and_tokens_are_those_of_the_window() -> None:
    error = 'Ingress:request_errors_total{stage="encode",code="stage_failed"}'
    snapshot = seen(later(ended=9, within=6, generated=100, prompt=50) | {error: 1})
    requests = snapshot.requests
    assert (requests.ended, requests.per_s) == (109, 4.5)
    assert (requests.errors, requests.errors_per_s, requests.error_ratio) == (1, 0.5, 0.1)
    assert requests.goodput == 3.0
    assert requests.goodput_ratio == pytest.approx(2 / 3)
    assert requests.rejections == {}
    assert seen(later(refused=2)).requests.rejections == {"queue": 2}
    assert (snapshot.tokens.generated, snapshot.tokens.generated_per_s, snapshot.tokens.prompt_per_s) == (1100, 50, 25)


def test_nothing_happened_is_no_ratio_and_no_latency() -> None:
    snapshot = seen(START)
    assert snapshot.requests.error_ratio is snapshot.requests.goodput_ratio is None
    assert [cache.hit_ratio for cache in snapshot.caches] == [None] * 3
    assert {(latency.p50, latency.p99) for latency in snapshot.latencies} == {(None, None)}


def test_latencies_are_quantiles_of_what_came_in_the_window() -> None:
    new = histogram("Ingress:time_to_first_token_seconds", {"0.1": 100, "0.5": 4, "+Inf": 0})
    ttft = seen(START | new).latencies[0]
    assert ttft.name == "TTFT"
    assert ttft.p50 == pytest.approx(0.3), "the hundred fast ones were before"
    assert ttft.p99 == pytest.approx(0.1 + 0.4 * 0.99)
    slow = histogram("Ingress:time_to_first_token_seconds", {"0.1": 101, "0.5": 0, "+Inf": 3})
    assert seen(START | slow).latencies[0].p99 == 0.5, "as far as the buckets go"


def test_deployments_have_their_replicas_queues_and_rates() -> None:
    deployments = {one.name: one for one in seen(later(encoded=8, decoded=40, guessed=6, ended=2)).deployments}
    assert list(deployments) == ["Ingress", "Shared-0", "Preprocess", "Generate"]
    assert [(one.replicas, one.ended) for one in deployments.values()] == [(1, 0), (1, 0), (1, 0), (2, 1)]
    works = {
        (name, work.name): (work.waiting, work.in_work, work.per_s)
        for name, one in deployments.items()
        for work in one.works
    }
    assert works == {
        ("Ingress", "requests"): (1, 3, 1),
        ("Shared-0", "items"): (None, 4, 0),
        ("Preprocess", "preprocess"): (5, None, 0),
        ("Generate", "encode"): (6, None, 4),
        ("Generate", "generate"): (2, 4, 23),
    }


def test_replicas_tell_of_their_engines() -> None:
    replicas = seen(START).replicas
    assert [(one.name, one.kv_usage, one.running, one.waiting) for one in replicas] == [
        ("i1", None, None, None),
        ("s1", None, None, None),
        ("p1", None, None, None),
        ("g1", 0.5, 3, 2),
        ("g2", 0.1, 1, 0),
    ]
    assert [one.waiting_prompt_tokens for one in replicas[-2:]] == [300, 0]
    assert {one.node for one in replicas} == {"10.0.0.1"}


def test_caches_have_hits_of_the_window_and_their_size() -> None:
    items, embeddings, prefixes = seen(later(mm_queries=4, mm_hits=1, prefix_queries=300, prefix_hits=200)).caches
    assert (items.hit_ratio, items.queries_per_s, items.evictions) == (0.25, 2, 2)
    assert (items.num_bytes, items.capacity_bytes, items.usage) == (2**20, 2**22, 0.25)
    assert (embeddings.hit_ratio, embeddings.usage) == (None, 0.5)
    assert prefixes.hit_ratio == pytest.approx(2 / 3)
    assert prefixes.usage == pytest.approx(0.3), "of the KV caches, on average"


def test_stages_budgets_keys_and_uploads() -> None:
    snapshot = seen(later(alice_requests=1, alice_prompt=30, alice_generated=10))
    assert snapshot.stages == [Stage("", "preprocess", False, 12), Stage("", "generate", True, 0.5)]
    assert snapshot.budgets == [Budget("requests", 2, 256), Budget("bytes", 2**20, 2**30)]
    assert snapshot.waiting_for_room == 1
    assert snapshot.keys == [KeyUse("alice", 61, 3540, 0.5, 20), KeyUse("bob", 40, 2500, 0, 0)]
    assert (snapshot.uploaded_files, snapshot.uploaded_bytes, snapshot.preemptions) == (7, 7000, 4)
    assert snapshot.version == "0.1.0"


def test_one_of_two_ingresses_that_misses_a_stage_is_enough() -> None:
    other = {
        'Ingress:stage_ready{replica="i2",stage="generate",model="shapes"}': 0,
        'Ingress:stage_heartbeat_age_seconds{replica="i2",stage="generate",model="shapes"}': 9,
        'Ingress:admission_used{replica="i2",resource="requests"}': 5,
        'Ingress:admission_limit{replica="i2",resource="requests"}': 256,
    }
    for both in (START | other, other | START):
        snapshot = seen(both)
        assert snapshot.stages[1] == Stage("", "generate", False, 0.5)
        assert snapshot.budgets[0] == Budget("requests", 7, 256), "the limit is that of both together"


def test_stages_of_several_models_have_their_names() -> None:
    other = 'Ingress:stage_ready{replica="i1",stage="generate",model="other"}'
    assert [(one.model, one.name) for one in seen(START | {other: 1}).stages] == [
        ("other", "generate"),
        ("shapes", "preprocess"),
        ("shapes", "generate"),
    ]


def test_a_counter_that_went_back_began_anew() -> None:
    assert seen(later(ended=-97)).requests.per_s == 1.5


def test_a_node_that_comes_back_brings_no_burst() -> None:
    """The first page lacks a node whose exporter did not answer then."""
    both = MetricsPage.of_text(page(later(ended=2)) + page(START, "10.0.0.2"))
    snapshot = summarize(read(START), both, 2.0)
    assert snapshot.requests.per_s == 1.0
    assert snapshot.requests.ended == 202
    assert next(one.replicas for one in snapshot.deployments if one.name == "Generate") == 4


def test_a_new_series_of_a_known_node_counts_from_nothing() -> None:
    carol = 'Ingress:api_key_requests_total{api_key="carol"}'
    assert KeyUse("carol", 3, 0, 1.5, 0) in seen(START | {carol: 3}).keys


def test_the_window_has_ten_seconds_and_forgets_what_nobody_read() -> None:
    pages = RecentPages(10.0)
    first = read(START)
    windows = [
        snapshot and snapshot.seconds for snapshot in (pages.add(first, float(now)) for now in (0, 2, 8, 11, 13, 14))
    ]
    assert windows == [None, 2, 8, 11, 11, 12]
    assert pages.add(first, 40.0) is None
    assert pages.add(first, 41.0) is not None


def test_all_that_it_reads_is_what_replicas_record() -> None:
    asked = set()
    shown = MetricsPage.of_text(page(START))

    def load(name: str) -> dict[Labels, float]:
        asked.add(name)
        return {frozenset(labels.items()): value for labels, value in shown.values(name)}

    summarize(MetricsPage(load), MetricsPage(load), 2.0)
    assert len(asked) > 40
    assert asked <= {name.removeprefix(PREFIX) for metric in defined().values() for name in exported_names(metric)}


def test_a_page_of_something_else_is_no_page() -> None:
    for text in ("", "<html><body>{ hello }</body></html>", 'vllm_prompt_tokens_total{model="a"} 1'):
        with pytest.raises(ValueError, match="not a page of the application's metrics"):
            MetricsPage.of_text(text)


@given(st.dictionaries(st.text(), st.floats(allow_nan=False), min_size=1))
def test_it_reads_what_prometheus_client_writes(values: dict[str, float]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("raylens_uploads_bytes", "Any text", ["api_key", "node"], registry=registry)
    for key, value in values.items():
        gauge.labels(key, "a} 1").set(value)
    page = MetricsPage.of_text(generate_latest(registry).decode())
    assert page.sums("uploads_bytes", "api_key") == values
