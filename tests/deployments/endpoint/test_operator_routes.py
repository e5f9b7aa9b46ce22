"""Who reads the metrics and the operator's page, and what reading them costs. (Over HTTP: test_operator_page.py.)"""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI

from raylens.deployments.endpoint import operator_routes
from raylens.deployments.endpoint.api_keys import hash_key
from raylens.deployments.endpoint.operator_routes import LiveFigures, OperatorRoutes
from raylens.deployments.stages.stage_calls import StageUnavailableError
from tests.gated import GatedClient, gated
from tests.metric_pages import START, page

PATHS = ("/metrics", "/dashboard/data")


class Exports:
    def __init__(self) -> None:
        self.times: list[float] = []

    async def __call__(self) -> bytes:
        self.times.append(time.monotonic())
        return page(START).encode()


def client(keys_file: Path | None = None, environment: dict[str, str] | None = None) -> GatedClient:
    api = FastAPI()
    OperatorRoutes(Exports()).add_to(api)
    return gated(api, environment, None if keys_file is None else str(keys_file))


def asked(client: GatedClient, path: str, key: str | None) -> Any:
    """The response."""
    return client.get(path, headers={} if key is None else {"authorization": f"Bearer {key}"})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_routes, "_LEAST_SECONDS", 0.2)


def test_a_server_without_keys_tells_everybody() -> None:
    assert [asked(client(), path, None).status_code for path in PATHS] == [200] * 2


def test_only_an_admin_s_key_is_told_of_the_others(tmp_path: Path) -> None:
    entries = [{"name": "alice", "sha256": hash_key("a")}, {"name": "root", "sha256": hash_key("r"), "admin": True}]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(entries))
    told = client(tmp_path / "keys.yaml", {"RAYLENS_API_KEYS": "own"})
    for path in PATHS:
        statuses = [asked(told, path, key).status_code for key in ("r", "own", "a", "wrong", None)]
        assert statuses == [200, 200, 403, 401, 401], path
        error = asked(told, path, "a").json()["error"]
        assert error == {
            "message": "this route takes an admin's API key, see docs/security.md",
            "type": "invalid_request_error",
            "param": None,
            "code": "forbidden",
        }
    assert asked(told, "/dashboard", None).status_code == 200, "the page itself tells nothing"


async def test_many_who_look_cost_one_reading() -> None:
    exports = Exports()
    figures = LiveFigures(exports)
    began = time.monotonic()
    first = await asyncio.gather(*(figures.now() for _ in range(10)))
    assert len(exports.times) == 2, "one to begin with, and one to compare it with"
    assert time.monotonic() - began >= 0.2
    assert len({id(snapshot) for snapshot in first}) == 1
    await asyncio.sleep(0.25)
    began = time.monotonic()
    second = await figures.now()
    assert (len(exports.times), second is first[0]) == (3, False)
    assert time.monotonic() - began < 0.15, "it waits only for the first page"
    assert second.requests.ended == 100


async def test_a_reading_that_fails_is_tried_anew() -> None:
    exports, silent = Exports(), [True]

    async def export() -> bytes:
        return b"" if silent.pop() else await exports()

    figures = LiveFigures(export)
    with pytest.raises(StageUnavailableError, match="no node tells its metrics now"):
        await figures.now()
    silent += [False, False]
    assert (await figures.now()).requests.ended == 100
