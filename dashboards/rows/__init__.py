"""The rows of the dashboard, from top to bottom."""

from dashboards.rows.caches import CACHES, SHARED
from dashboards.rows.cluster import ERRORS, OBJECT_STORE, REPLICAS
from dashboards.rows.overview import OBJECTIVES, REQUESTS, WATERFALL
from dashboards.rows.stages import ENCODE, GENERATE, INGRESS, KV_CACHE, PREPROCESS

ROWS = (
    OBJECTIVES,
    WATERFALL,
    REQUESTS,
    INGRESS,
    SHARED,
    PREPROCESS,
    ENCODE,
    GENERATE,
    CACHES,
    KV_CACHE,
    OBJECT_STORE,
    REPLICAS,
    ERRORS,
)
