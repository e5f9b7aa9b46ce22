"""The rows of the dashboard, from top to bottom."""

from dashboards.rows import caches, cluster, overview, stages

ROWS = (
    *(overview.OBJECTIVES, overview.WATERFALL, overview.REQUESTS),
    *(stages.INGRESS, caches.SHARED, stages.PREPROCESS, stages.ENCODE, stages.GENERATE),
    *(caches.CACHES, stages.KV_CACHE),
    *(cluster.OBJECT_STORE, cluster.REPLICAS, cluster.ERRORS),
)
