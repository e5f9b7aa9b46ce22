"""A few routes behind the real gate, in this process."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from raylens.deployments.config import AdmissionConfig
from raylens.deployments.endpoint.admission import Admission
from raylens.deployments.endpoint.api_keys import ApiKeys
from raylens.deployments.endpoint.errors import add_error_handlers
from raylens.deployments.endpoint.gate import Gate
from raylens.deployments.endpoint.ingress import REQUESTS
from raylens.deployments.pipeline.turns import Turns
from raylens.deployments.routing.work_scaling import PendingWork
from raylens.deployments.tracing.spans import Spans


class GatedClient(TestClient):
    """`errors`: stage and code of each that was counted."""

    errors: list[tuple[str, str]]


def gated(
    api: FastAPI, environment: Mapping[str, str] | None = None, keys_file: str | None = None, **settings: Any
) -> GatedClient:
    """`environment` and `keys_file` may hold API keys, `settings` are those of AdmissionConfig."""
    config = AdmissionConfig.model_validate(settings)
    errors: list[tuple[str, str]] = []
    add_error_handlers(api)
    api.add_middleware(
        Gate,
        keys=ApiKeys(keys_file, environment or {}),
        admission=Admission(config, lambda reason: None),
        config=config,
        origins=["https://known.example"],
        hosts=["raylens.example"],
        count_error=lambda stage, code: errors.append((stage, code)),
        open_requests=PendingWork(REQUESTS),
        spans=Spans(),
        turns=Turns(),
    )
    client = GatedClient(api, base_url="http://raylens.example", raise_server_exceptions=False)
    client.errors = errors
    return client
