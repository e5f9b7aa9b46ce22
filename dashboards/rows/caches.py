"""Rows about the shards that all replicas of the ingress share, and about their two caches."""

from dashboards.panels import Bytes, BytesPerSecond, Count, PerSecond, Row, Share
from dashboards.promql import APPLICATION, counted, of_replicas, share

_CACHES = {"mm_cache": "processed", "encoder_cache": "embeddings"}


def _of_both(expression: str, legend: str = "") -> dict[str, str]:
    """Returns `expression` for each cache, with the cache's name in place of CACHE."""
    return {f"{kind} {legend}".strip(): expression.replace("CACHE", name) for name, kind in _CACHES.items()}


CACHES = Row(
    "Caches",
    Share(
        "Hit rate",
        _of_both(share(counted("CACHE_hits", "modality"), counted("CACHE_queries", "modality")), "{{modality}}"),
        "No value while no item is looked up. A hit among the embeddings skips the lookup among the processed items.",
    ),
    Bytes("Size", _of_both(of_replicas("CACHE_bytes")) | _of_both(of_replicas("CACHE_capacity_bytes"), "at most")),
    PerSecond("Evictions", _of_both(counted("CACHE_evictions", "modality"), "{{modality}}")),
)

SHARED = Row(
    "Shared",
    Count("Items in progress", {"{{deployment}}": of_replicas("items_in_progress", "deployment")}),
    BytesPerSecond(
        "Tensors handed over",
        {"{{edge}}": counted("object_store_transfer_bytes", "edge")},
        "By reference. Panel `Tensors between nodes` shows the part that crossed the network.",
    ),
    BytesPerSecond("Tensors between nodes", {"{{edge}}": counted("node_transfer_bytes", "edge", of=APPLICATION)}),
    Count("Uploaded files", {"{{deployment}}": of_replicas("uploads_files", "deployment")}),
    Bytes("Size of uploaded files", {"{{deployment}}": of_replicas("uploads_bytes", "deployment")}),
)
