"""A request's trace, received by a real collector of OpenTelemetry: which spans there are, and what they say."""

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest

from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from tests.otlp_collector import Collector, collecting
from tests.pictures import disc, encoded, user_message
from tests.slow_encoder import large_picture, make_slow_checkpoint
from tests.traced import OF_GENERATE, OF_ITEM, Asked, Traced
from tests.waiting import wait_until

SIDE = 700  # pixels: a picture takes a tenth of a second to encode
PORT = free_port()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting(PORT) as collector:
        yield collector


@pytest.fixture(scope="module")
def app_config(tmp_path_factory: pytest.TempPathFactory) -> AppConfig:
    checkpoint = make_slow_checkpoint(tmp_path_factory.mktemp("model"), SIDE)
    return AppConfig.model_validate(
        {
            "model": checkpoint,
            "served_model_name": "small",
            "further_models": [{"model": checkpoint, "served_model_name": "inline", "encode": {"placement": "inline"}}],
            "tracing": {"endpoint": f"http://127.0.0.1:{PORT}", "sample_ratio": 1},
        }
    )


def agree(traced: Traced, seconds: dict[str, float]) -> bool:
    return all(abs(traced.longest(stage) - value) < 0.002 for stage, value in seconds.items())


@pytest.mark.parametrize(
    ("model", "stream", "processes"),
    [
        ("small", False, ("Ingress", "Shared-0", "Preprocess", "Encode", "Generate")),
        ("small", True, ("Ingress", "Shared-0", "Preprocess", "Encode", "Generate")),
        ("inline", False, ("Ingress", "Shared-0", "Preprocess-inline", "Generate-inline", "Generate-inline")),
    ],
)
def test_a_picture_s_way_is_one_trace_whose_times_are_those_of_the_answer(
    app_url: str, collector: Collector, model: str, stream: bool, processes: tuple[str, ...]
) -> None:
    """`processes`: those of the ingress and the shard, and those that process, encode and generate."""
    asked = Asked(app_url, large_picture(10 + stream, SIDE), model=model, stream=stream)
    assert asked.response.status_code == 200, asked.response.text
    traced = Traced(collector, asked, *OF_ITEM, *OF_GENERATE, "item", "generate")
    root = traced.root
    assert (root.name, root.kind, root.parent_id, root.status) == ("POST /v1/chat/completions", 2, "", 0)
    assert traced.children(root) - {"render"} == {"admission_queue", "media_fetch", "item", "generate"}
    assert traced.children(traced.named("item")) == set(OF_ITEM)
    assert traced.children(traced.named("generate")) - {"render"} == set(OF_GENERATE)
    assert {"admission_queue", "processor_queue"} < asked.seconds.keys()
    assert asked.seconds.keys() == traced.names - {root.name, "item", "generate", "decode"}
    assert agree(traced, asked.seconds)
    places = {span.name: span.place.partition("#")[0] for span in traced.spans}
    assert tuple(places[name] for name in ("media_fetch", "item", "processor", "encode", "prefill")) == processes
    for span in traced.spans:
        assert root.start - 0.002 <= span.start <= span.end <= root.end + 0.002, span


def test_the_stages_follow_each_other_without_a_gap(app_url: str, collector: Collector) -> None:
    """Where a time is missing, someone looks for it in vain. A call by Ray takes some milliseconds. On a busy machine a
    process may have to wait between two stages, but not each time."""
    gaps, shares = [], []
    for number in range(20, 25):
        traced = Traced(collector, Asked(app_url, large_picture(number, SIDE)), *OF_ITEM, "item")
        spans = [traced.named(name) for name in OF_ITEM]
        queue, encode = traced.named("encode_queue"), traced.named("encode")
        assert abs(encode.start - queue.end) < 1e-6
        gaps.append(max(abs(after.start - before.end) for before, after in pairwise(spans[:3])))
        shares.append(sum(span.seconds for span in spans) / traced.named("item").seconds)
    assert min(gaps) < 0.002
    assert max(shares) > 0.6


def test_the_span_of_a_request_says_what_was_asked_and_answered(app_url: str, collector: Collector) -> None:
    asked = Asked(app_url, large_picture(30, SIDE), headers={"x-request-id": "asked-of-30"})
    told = Traced(collector, asked).root.attributes
    usage = asked.response.json()["usage"]
    assert told["http.request.method"] == "POST"
    assert told["http.route"] == told["url.path"] == "/v1/chat/completions"
    assert told["http.response.status_code"] == 200
    assert told["raylens.request_id"] == "asked-of-30"
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "small"
    assert told["gen_ai.response.id"] == asked.response.json()["id"]
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 4
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < told["gen_ai.latency.time_to_first_token"] < 60


def test_a_request_joins_its_client_s_trace(app_url: str, collector: Collector) -> None:
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01", "tracestate": "vendor=1"}
    asked = Asked(app_url, headers=headers)
    assert (asked.trace_id, asked.flags) == (trace_id, "01")
    traced = Traced(collector, asked, "prefill", "generate")
    assert traced.root.parent_id == parent_id
    assert {span.tracestate for span in traced.spans} == {"vendor=1"}


def test_a_trace_that_its_client_does_not_collect_is_not_collected(app_url: str, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    asked = Asked(app_url, headers={"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-00"})
    assert (asked.trace_id, asked.flags) == (trace_id, "00")
    Traced(collector, Asked(app_url), "generate")  # a later one has come
    assert collector.of_trace(trace_id) == []


def test_a_trace_that_cannot_be_read_is_no_error(app_url: str) -> None:
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    for bad in (
        "nonsense",
        f"ff-{trace_id}-{span_id}-01",
        f"00-{'0' * 32}-{span_id}-01",
        f"00-{trace_id}-{'0' * 16}-01",
        f"00-{trace_id.upper()}g-{span_id}-01",
        f"00-{trace_id}-{span_id}-01-more",
        "0" * 5000,
    ):
        asked = Asked(app_url, headers={"traceparent": bad})
        assert asked.response.status_code == 200
        assert asked.trace_id not in (trace_id, "0" * 32)


def test_what_is_in_a_cache_is_not_made_again(app_url: str, collector: Collector) -> None:
    picture = large_picture(40, SIDE)
    Asked(app_url, picture)
    traced = Traced(collector, Asked(app_url, picture), "item", "generate", "prefill")
    assert traced.names.isdisjoint(OF_ITEM)
    assert traced.named("item").attributes["raylens.detail"] == "embeddings cached"
    assert "transfer_embeddings" in traced.children(traced.named("generate"))


def asked_together(url: str, picture: bytes) -> list[Asked]:
    """Two requests about one picture at once."""
    together = threading.Barrier(2)

    def ask(_: int) -> Asked:
        together.wait()
        return Asked(url, picture)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(ask, range(2)))


def has_cached(asked: Asked) -> bool:
    return bool(asked.response.json()["stage_timings"]["embedding_cache_hits"])


def test_a_picture_that_two_requests_wait_for_is_in_the_trace_of_the_first(app_url: str, collector: Collector) -> None:
    tries = (asked_together(app_url, large_picture(number, 3 * SIDE)) for number in range(50, 60))
    # On a busy machine, one may come only when the picture is there already.
    both = next(both for both in tries if not any(map(has_cached, both)))
    ids = {asked.trace_id for asked in both}
    # A request may order a picture twice, without and with its content. The second order has its own span.
    wait_until(lambda: any(span.trace_id in ids and span.name == "item" and span.links for span in collector.spans))
    wait_until(lambda: any(span.trace_id in ids and span.name == "encode" for span in collector.spans))
    traces = [Traced(collector, asked, "item", "generate", "prefill") for asked in both]
    makers = [trace for trace in traces if "encode" in trace.names]
    assert len(makers) == 1
    (maker,), (joined,) = makers, [trace for trace in traces if trace not in makers]
    assert joined.names.isdisjoint(OF_ITEM)
    item = next(span for span in joined.spans if span.name == "item" and span.links)
    assert set(item.links) <= {span.span_id for span in maker.spans if span.name == "item"}
    request_id = maker.root.attributes["raylens.request_id"]
    assert item.attributes["raylens.detail"] == f"made for request {request_id}"


def test_a_picture_that_cannot_be_read_is_an_error_of_its_item(app_url: str, collector: Collector) -> None:
    asked = Asked(app_url, encoded(disc("red"))[:-40])
    assert asked.response.status_code == 400
    traced = Traced(collector, asked, "item")
    item = traced.named("item")
    assert (item.status, item.events) == (2, ["exception"])
    root = traced.root  # a client's mistake is no failure of the server
    assert (root.status, root.events) == (0, ["exception"])
    assert root.attributes["http.response.status_code"] == 400
    assert root.attributes["error.type"] == asked.response.json()["error"]["code"]


def test_what_programs_ask_every_few_seconds_has_no_trace(app_url: str, collector: Collector) -> None:
    for path in ("/health", "/ping", "/metrics"):
        assert "traceparent" not in httpx.get(f"{app_url}{path}").headers
    Traced(collector, Asked(app_url), "generate")
    names = {span.name for span in collector.spans}
    assert not any("health" in name or "heartbeat" in name or "metrics" in name or "ping" in name for name in names)
    roots = [span for span in collector.spans if span.kind == 2]
    assert {span.attributes["url.path"] for span in roots} == {"/v1/chat/completions"}
    assert {span.trace_id for span in collector.spans} == {span.trace_id for span in roots}


def test_a_client_that_leaves_is_no_failure(app_url: str, collector: Collector) -> None:
    question = {"model": "small", "messages": [user_message("What?")]}
    body = question | {"stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", f"{app_url}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        next(answer.iter_lines())
        trace_id = answer.headers["traceparent"].split("-")[1]
    wait_until(lambda: {"generate"} < {span.name for span in collector.of_trace(trace_id)})
    (generate,) = [span for span in collector.of_trace(trace_id) if span.name == "generate"]
    assert generate.status == 0
