"""Rows about the shards that all replicas of the ingress share, and about their two caches."""

from dashboards.panels import Panel, Query, Row
from dashboards.promql import APPLICATION, counted, of_replicas, share

_CACHES = {"mm_cache": "processed", "encoder_cache": "embeddings"}


def _of_both(expression: str, legend: str = "") -> tuple[Query, ...]:
    """Returns `expression` for each cache, with the cache's name in place of CACHE."""
    return tuple(Query(expression.replace("CACHE", name), f"{kind} {legend}".strip()) for name, kind in _CACHES.items())


CACHES = Row(
    "Caches",
    (
        Panel(
            "Hit rate",
            "percentunit",
            _of_both(share(counted("CACHE_hits", "modality"), counted("CACHE_queries", "modality")), "{{modality}}"),
            "No value while no item is looked up. A hit among the embeddings skips the lookup among the processed "
            "items.",
        ),
        Panel(
            "Size",
            "bytes",
            (
                *_of_both(of_replicas("CACHE_bytes")),
                *_of_both(of_replicas("CACHE_capacity_bytes"), "at most"),
            ),
        ),
        Panel("Evictions", "ops", _of_both(counted("CACHE_evictions", "modality"), "{{modality}}")),
    ),
)

SHARED = Row(
    "Shared",
    (
        Panel("Items in progress", "short", (Query(of_replicas("items_in_progress", "deployment"), "{{deployment}}"),)),
        Panel(
            "Tensors handed over",
            "Bps",
            (Query(counted("object_store_transfer_bytes", "edge"), "{{edge}}"),),
            "By reference. Panel `Tensors between nodes` shows the part that crossed the network.",
        ),
        Panel(
            "Tensors between nodes",
            "Bps",
            (Query(counted("node_transfer_bytes", "edge", of=APPLICATION), "{{edge}}"),),
        ),
        Panel("Uploaded files", "short", (Query(of_replicas("uploads_files", "deployment"), "{{deployment}}"),)),
        Panel(
            "Size of uploaded files",
            "bytes",
            (Query(of_replicas("uploads_bytes", "deployment"), "{{deployment}}"),),
        ),
    ),
)
