"""A request to the endpoint, and the spans of its trace that a collector has got."""

import json
from typing import Any

import httpx

from tests.otlp_collector import Collector, Received
from tests.pictures import user_message
from tests.waiting import wait_until

OF_ITEM = ("processor_queue", "media_decode", "processor", "transfer_pixels", "encode_queue", "encode")
OF_GENERATE = ("transfer_embeddings", "llm_queue", "prefill", "first_decode", "decode")


class Asked:
    """A request that has been sent: the answer, and the ids of its trace."""

    def __init__(self, url: str, *pictures: bytes, headers: dict[str, str] | None = None, **fields: Any) -> None:
        body = {
            "model": "small",
            "messages": [user_message("What?", *pictures)],
            "temperature": 0,
            "max_tokens": 4,
            "ignore_eos": True,
            "stage_timings": True,
        } | fields
        self.response = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert self.response.status_code < 500, self.response.text
        self.traceparent = self.response.headers["traceparent"]
        _, self.trace_id, self.span_id, self.flags = self.traceparent.split("-")

    @property
    def seconds(self) -> dict[str, float]:
        """The stage timings in the answer, or in the last event that has some."""
        if self.response.headers["content-type"] == "application/json":
            found: dict[str, float] = self.response.json()["stage_timings"]["seconds"]
            return found
        lines = [line.removeprefix("data: ") for line in self.response.text.splitlines() if line.startswith("data: {")]
        return next(one["stage_timings"]["seconds"] for one in map(json.loads, lines) if "stage_timings" in one)


class Traced:
    """The spans of one trace."""

    def __init__(self, collector: Collector, asked: Asked, *names: str) -> None:
        """Waits for the request's own span and for spans of these names."""
        wanted = {asked.span_id}
        wait_until(lambda: wanted <= {span.span_id for span in collector.of_trace(asked.trace_id)})
        wait_until(lambda: set(names) <= {span.name for span in collector.of_trace(asked.trace_id)})
        self.spans = collector.of_trace(asked.trace_id)
        (self.root,) = [span for span in self.spans if span.span_id == asked.span_id]

    def named(self, name: str) -> Received:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def children(self, parent: Received) -> set[str]:
        return {span.name for span in self.spans if span.parent_id == parent.span_id}

    @property
    def names(self) -> set[str]:
        return {span.name for span in self.spans}

    def longest(self, name: str) -> float:
        return max(span.seconds for span in self.spans if span.name == name)
