"""A real Ray cluster with the application on it, once a module, and clients for it."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from deployments.config import AppConfig
from deployments.local_cluster import free_port, running_app


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    """What `app_url` serves; a module with other needs overrides it."""
    return AppConfig.model_validate({"model": shapes, "media": {"max_items": 4, "allow_private_addresses": True}})


@pytest.fixture(scope="module")
def app_url(app_config: AppConfig) -> Iterator[str]:
    with running_app(app_config, host="127.0.0.1", port=free_port()) as url:
        yield url


@pytest.fixture(scope="module")
def client(app_url: str) -> OpenAI:
    return OpenAI(base_url=f"{app_url}/v1", api_key="unused", max_retries=0, timeout=60)
