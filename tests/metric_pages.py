"""Pages of metrics as the endpoint's /metrics gives them, written by hand."""

from collections.abc import Mapping

Series = Mapping[str, float]
"""The value of each series, as "name{label="value",...}" without `raylens_` and without the labels of every series."""

_COMMON = 'application="raylens",node="{node}"'


def page(series: Series, node: str = "10.0.0.1") -> str:
    """The text of one node's series. A name that begins with "Deployment:" tells its deployment."""
    lines = []
    for key, value in series.items():
        deployment, _, rest = key.rpartition(":")
        name, _, labels = rest.partition("{")
        own = ",".join(
            part for part in (_COMMON.format(node=node), f'deployment="{deployment}"', labels.rstrip("}")) if part
        )
        lines.append(f"raylens_{name}{{{own}}} {value}")
    return "\n".join(lines) + "\n"


def histogram(key: str, counts: Mapping[str, int]) -> dict[str, float]:
    """The series of a histogram from the number of observations of each bucket, by the bucket's bound."""
    series: dict[str, float] = {}
    total = 0
    for bound, count in counts.items():
        total += count
        series[f'{key}_bucket{{le="{bound}"}}'] = total
    return series | {f"{key}_count": total}


START = {
    'Ingress:build_info{replica="i1",version="0.1.0",ray_version="2.60.0"}': 1,
    "Ingress:replica_starts_total": 1,
    'Ingress:replica_start_time_seconds{replica="i1"}': 1_000_000,
    "Generate:replica_starts_total": 3,
    'Generate:replica_start_time_seconds{replica="g1"}': 1_000_000,
    'Generate:replica_start_time_seconds{replica="g2"}': 1_000_100,
    "Preprocess:replica_starts_total": 1,
    'Preprocess:replica_start_time_seconds{replica="p1"}': 1_000_000,
    "Shared-0:replica_starts_total": 1,
    'Shared-0:replica_start_time_seconds{replica="s1"}': 1_000_000,
    'Ingress:stage_ready{replica="i1",stage="generate",model="shapes"}': 1,
    'Ingress:stage_ready{replica="i1",stage="preprocess",model="shapes"}': 0,
    'Ingress:stage_heartbeat_age_seconds{replica="i1",stage="generate",model="shapes"}': 0.5,
    'Ingress:stage_heartbeat_age_seconds{replica="i1",stage="preprocess",model="shapes"}': 12,
    'Ingress:request_success_total{model="shapes",finished_reason="stop"}': 100,
    'Ingress:request_success_total{model="shapes",finished_reason="length"}': 0,
    'Ingress:requests_within_slo_total{model="shapes"}': 90,
    'Ingress:admission_rejections_total{reason="queue"}': 0,
    'Ingress:generation_tokens_total{model="shapes"}': 1000,
    'Ingress:prompt_tokens_total{model="shapes"}': 5000,
    'Ingress:open_http_requests{replica="i1"}': 3,
    'Ingress:admission_waiting_requests{replica="i1"}': 1,
    'Ingress:admission_used{replica="i1",resource="requests"}': 2,
    'Ingress:admission_limit{replica="i1",resource="requests"}': 256,
    'Ingress:admission_used{replica="i1",resource="bytes"}': 1048576,
    'Ingress:admission_limit{replica="i1",resource="bytes"}': 1073741824,
    'Ingress:api_key_requests_total{api_key="alice"}': 60,
    'Ingress:api_key_prompt_tokens_total{api_key="alice"}': 3000,
    'Ingress:api_key_generation_tokens_total{api_key="alice"}': 500,
    'Ingress:api_key_requests_total{api_key="bob"}': 40,
    'Ingress:api_key_prompt_tokens_total{api_key="bob"}': 2000,
    'Ingress:api_key_generation_tokens_total{api_key="bob"}': 500,
    'Shared-0:mm_cache_queries_total{modality="image"}': 10,
    'Shared-0:mm_cache_hits_total{modality="image"}': 0,
    'Shared-0:mm_cache_evictions_total{modality="image"}': 2,
    'Shared-0:mm_cache_bytes{replica="s1"}': 1048576,
    'Shared-0:mm_cache_capacity_bytes{replica="s1"}': 4194304,
    'Shared-0:encoder_cache_queries_total{modality="image"}': 50,
    'Shared-0:encoder_cache_hits_total{modality="image"}': 40,
    'Shared-0:encoder_cache_evictions_total{modality="image"}': 0,
    'Shared-0:encoder_cache_bytes{replica="s1"}': 2097152,
    'Shared-0:encoder_cache_capacity_bytes{replica="s1"}': 4194304,
    'Shared-0:items_in_progress{replica="s1"}': 4,
    'Shared-0:uploads_files{replica="s1"}': 7,
    'Shared-0:uploads_bytes{replica="s1"}': 7000,
    'Preprocess:preprocess_items_total{modality="image",status="ok"}': 10,
    'Preprocess:preprocess_waiting_items{replica="p1"}': 5,
    'Generate:encoder_items_total{modality="image",status="ok"}': 10,
    'Generate:encoder_waiting_items{replica="g1"}': 6,
    "Generate:engine_decoded_sequences_total": 1000,
    "Generate:spec_decode_num_accepted_tokens_total": 10,
    'Generate:num_requests_running{replica="g1"}': 3,
    'Generate:num_requests_running{replica="g2"}': 1,
    'Generate:num_requests_waiting{replica="g1"}': 2,
    'Generate:num_requests_waiting{replica="g2"}': 0,
    'Generate:waiting_prompt_tokens{replica="g1"}': 300,
    'Generate:waiting_prompt_tokens{replica="g2"}': 0,
    'Generate:kv_cache_usage_perc{replica="g1"}': 0.5,
    'Generate:kv_cache_usage_perc{replica="g2"}': 0.1,
    "Generate:num_preemptions_total": 4,
    "Generate:prefix_cache_queries_total": 5000,
    "Generate:prefix_cache_hits_total": 1000,
    **histogram("Ingress:time_to_first_token_seconds", {"0.1": 100, "0.5": 0, "+Inf": 0}),
}
"""A server of two engines, one of them busy. Its preprocess stage is away, and a third engine has ended."""
