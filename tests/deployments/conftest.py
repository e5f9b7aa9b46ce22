"""A real Ray cluster with the application on it, once for all modules in a row that serve the same, and clients."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from openai import OpenAI

from checkpoints import PICTURES
from deployments.config import AppConfig
from deployments.local_cluster import free_port, running_app


class RunningApp:
    """The application that is up, if one is."""

    def __init__(self) -> None:
        self._config: AppConfig | None = None
        self._stack = ExitStack()
        self._url = ""

    def url(self, config: AppConfig) -> str:
        if config != self._config:
            self.stop()
            self._url = self._stack.enter_context(running_app(config, host="127.0.0.1", port=free_port()))
            self._config = config
        return self._url

    def stop(self) -> None:
        self._config = None
        self._stack.close()


_RUNNING = RunningApp()
_MODULES: set[Path] = set()
"""Those with a test that needs the application."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _MODULES.update(item.path for item in items if "app_url" in getattr(item, "fixturenames", ()))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Those come first that share one application, in the end those that do it harm; the order is kept otherwise."""
    module = getattr(item, "module", None)
    if item.path not in _MODULES or hasattr(module, "app_config"):
        return 2
    return int(hasattr(module, "keeps_app_as_it_is"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # There is one Ray session in a process: modules that start their own find none, nor do tests of other packages.
    if nextitem is None or nextitem.path not in _MODULES:
        _RUNNING.stop()


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    """What `app_url` serves; a module with other needs overrides it."""
    media = {
        "limits": {"max_items": 4},
        "fetch": {"allow_private_addresses": True},
        "local_root": str(PICTURES),
    }
    return AppConfig.model_validate({"model": shapes, "media": media})


@pytest.fixture(scope="module")
def keeps_app_as_it_is() -> bool:
    """Whether the next module may go on with the same application; one that kills parts of it overrides this."""
    return True


@pytest.fixture(scope="module")
def app_url(app_config: AppConfig, keeps_app_as_it_is: bool) -> Iterator[str]:
    yield _RUNNING.url(app_config)
    if not keeps_app_as_it_is:
        _RUNNING.stop()


@pytest.fixture(scope="module")
def client(app_url: str) -> OpenAI:
    return OpenAI(base_url=f"{app_url}/v1", api_key="unused", max_retries=0, timeout=60)
