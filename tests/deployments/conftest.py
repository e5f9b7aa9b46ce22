"""A real Ray cluster, once for all modules in a row, the application on it that each of them serves, and clients."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from raylens.checkpoints import PICTURES
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import deployed_app, local_ray

if TYPE_CHECKING:
    from openai import OpenAI


class RunningApp:
    """One Ray session for all modules in a row that need one, and the application that is on it, if one is."""

    def __init__(self) -> None:
        self._port: int | None = None
        self._ray = ExitStack()
        self._config: AppConfig | None = None
        self._url = ""
        self._app = ExitStack()

    def port(self) -> int:
        """Where an application on the session answers; none is on it."""
        self.end_app()
        if self._port is None:
            port = free_port()
            self._ray.enter_context(local_ray(host="127.0.0.1", port=port, num_cpus=_NUM_CPUS))
            self._port = port
        return self._port

    def url(self, config: AppConfig) -> str:
        if config != self._config:
            self._url = self._app.enter_context(deployed_app(config, host="127.0.0.1", port=self.port()))
            self._config = config
        return self._url

    def stop(self) -> None:
        self.end_app()
        self._port = None
        self._ray.close()

    def end_app(self) -> None:
        self._config = None
        self._app.close()


_NUM_CPUS = 8  # on offer; no application of the tests reserves more
_RUNNING = RunningApp()
_WITH_APP: set[Path] = set()
"""Modules with a test that needs the application of `app_config`."""
_WITH_PORT: set[Path] = set()
"""Modules that deploy their own applications on the Ray session."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for modules, fixture in ((_WITH_APP, "app_url"), (_WITH_PORT, "ray_port")):
        modules.update(item.path for item in items if fixture in getattr(item, "fixturenames", ()))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Modules come first that share one application, then the one that does it harm, then those with applications of
    their own, last those that need none. The order is kept otherwise."""
    module = getattr(item, "module", None)
    if item.path in _WITH_PORT or (item.path in _WITH_APP and hasattr(module, "app_config")):
        return 2
    if item.path in _WITH_APP:
        return int(hasattr(module, "keeps_app_as_it_is"))
    return 3


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # There is one Ray session in a process: modules that start their own find none, nor do tests of other packages.
    if nextitem is None or nextitem.path not in _WITH_APP | _WITH_PORT:
        _RUNNING.stop()


@pytest.fixture(scope="module")
def ray_port() -> int:
    """The HTTP port of a Ray session without an application, for modules that deploy their own."""
    return _RUNNING.port()


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    """What `app_url` serves; a module with other needs overrides it."""
    media = {
        "limits": {"max_items": 4},
        "fetch": {"allow_private_addresses": True},
        "local_root": str(PICTURES),
    }
    return AppConfig.model_validate({"model": shapes, "media": media, "pooling": {"type": "last"}})


@pytest.fixture(scope="module")
def keeps_app_as_it_is() -> bool:
    """Whether the next module may go on with the same application; one that kills parts of it overrides this."""
    return True


@pytest.fixture(scope="module")
def app_url(app_config: AppConfig, keeps_app_as_it_is: bool) -> Iterator[str]:
    yield _RUNNING.url(app_config)
    if not keeps_app_as_it_is:
        _RUNNING.end_app()


@pytest.fixture(scope="module")
def client(app_url: str) -> "OpenAI":
    from openai import OpenAI  # takes a second, which tests without a server save

    return OpenAI(base_url=f"{app_url}/v1", api_key="unused", max_retries=0, timeout=60)
