"""Rows about the shards that all replicas of the ingress share, and about their two caches."""

from dashboards.panels import Panel, Row
from dashboards.promql import APPLICATION, counted, of_replicas, share

_CACHES = {"mm_cache": "processed", "encoder_cache": "embeddings"}


def _of_both(expression: str, legend: str = "") -> dict[str, str]:
    """Returns `expression` for each cache, with the cache's name in place of CACHE."""
    return {f"{kind} {legend}".strip(): expression.replace("CACHE", name) for name, kind in _CACHES.items()}


CACHES = Row(
    "Caches",
    Panel(
        "Hit rate",
        "percentunit",
        _of_both(share(counted("CACHE_hits", "modality"), counted("CACHE_queries", "modality")), "{{modality}}"),
        "No value while no item is looked up. A hit among the embeddings skips the lookup among the processed items.",
    ),
    Panel(
        "Size", "bytes", _of_both(of_replicas("CACHE_bytes")) | _of_both(of_replicas("CACHE_capacity_bytes"), "at most")
    ),
    Panel("Evictions", "ops", _of_both(counted("CACHE_evictions", "modality"), "{{modality}}")),
)

SHARED = Row(
    "Shared",
    Panel("Items in progress", "short", {"{{deployment}}": of_replicas("items_in_progress", "deployment")}),
    Panel(
        "Tensors handed over",
        "Bps",
        {"{{edge}}": counted("object_store_transfer_bytes", "edge")},
        "By reference. Panel `Tensors between nodes` shows the part that crossed the network.",
    ),
    Panel("Tensors between nodes", "Bps", {"{{edge}}": counted("node_transfer_bytes", "edge", of=APPLICATION)}),
    Panel("Uploaded files", "short", {"{{deployment}}": of_replicas("uploads_files", "deployment")}),
    Panel("Size of uploaded files", "bytes", {"{{deployment}}": of_replicas("uploads_bytes", "deployment")}),
)
