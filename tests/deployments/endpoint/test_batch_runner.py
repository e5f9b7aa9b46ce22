"""A batch's runner: which answers are a line's own, and what ends the work."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from raylens.deployments.batch import attempts
from raylens.deployments.endpoint.api_keys import ApiKeys
from raylens.deployments.endpoint.batch_runner import BatchRunner
from raylens.deployments.stages.stage_calls import StageUnavailableError
from raylens.preprocess.schema import InvalidRequestError
from tests.waiting import until

TENANT = "salt of alice"
PATH = "/v1/completions"


class Shard:
    """A shard with one batch, as much as a runner asks of it. `answers`: the status of each answered line."""

    shards = ("0",)

    def __init__(self, *custom_ids: str, answered: tuple[str, ...] = ()) -> None:
        lines = [{"custom_id": one, "url": PATH, "body": {"prompt": one}} for one in custom_ids]
        self.content = "\n".join(map(json.dumps, lines)).encode()
        self.answers: dict[str, tuple[int, bool]] = {}
        self.failures: list[str] = []
        self.room_for = 1000
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.ended = asyncio.Event()
        self._answered = list(answered)
        self._number = len(custom_ids)

    async def next(self, shard: str) -> tuple[str, str]:
        await self.is_free.wait()
        self.is_free.clear()
        return TENANT, "batch_1"

    async def hold(self, tenant: str, batch_id: str) -> bool:
        await self.ended.wait()
        return True

    async def outline(self, tenant: str, batch_id: str) -> bytes:
        return json.dumps({"endpoint": PATH, "input_file_id": "file-1", "answered": self._answered}).encode()

    async def read(self, tenant: str, file_id: str) -> bytes:
        return self.content

    async def begin(self, tenant: str, batch_id: str, num_total: int) -> None:
        assert num_total == self._number

    async def add(self, tenant: str, batch_id: str, custom_id: str, is_error: bool, line: bytes) -> None:
        if len(self.answers) >= self.room_for:
            raise InvalidRequestError("full", field="file", code="no_room")
        self.answers[custom_id] = (json.loads(line)["response"]["status_code"], is_error)

    async def fail(self, tenant: str, batch_id: str, errors: list[dict[str, Any]]) -> None:
        self.failures += [one["code"] for one in errors]


class Routes:
    """Answers each prompt with its statuses, one after the other, then with 200."""

    def __init__(self, **statuses: list[int]) -> None:
        self.statuses = statuses
        self.asked: Counter[str] = Counter()
        self.callers: list[Any] = []
        self.num_cancelled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        self.asked[prompt] += 1
        self.callers.append(scope["state"]["caller"])
        left = self.statuses.get(prompt, [])
        status = left.pop(0) if left else 200
        if status == 0:
            try:
                await asyncio.Event().wait()
            finally:
                self.num_cancelled += 1
        await send({"type": "http.response.start", "status": status, "headers": [(b"retry-after", b"0")]})
        await send({"type": "http.response.body", "body": b"{}"})
        if status == 500:
            raise RuntimeError("as Starlette does behind an answer")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_LONGEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("raylens.deployments.endpoint.batch_runner._PAUSE_SECONDS", 0.01)


Start = Callable[[Shard, Routes], None]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    runners: list[BatchRunner] = []

    def begin(shard: Shard, routes: Routes) -> None:
        made: Any = BatchRunner
        runners.append(made(shard, shard, ApiKeys(None, {}), routes))
        runners[-1].open()

    yield begin
    for runner in runners:
        await runner.close()


async def test_a_line_is_sent_until_it_has_an_answer_of_its_own(start: Start) -> None:
    shard, routes = Shard("a", "b", "c", "d"), Routes(a=[503, 429, 503, 503], b=[400], c=[500] * 5, d=[500, 504])
    start(shard, routes)
    await until(lambda: len(shard.answers) == 4)
    assert shard.answers == {"a": (200, False), "b": (400, True), "c": (500, True), "d": (200, False)}
    assert routes.asked == {"a": 5, "b": 1, "c": 3, "d": 3}
    caller = routes.callers[0]
    assert (caller.cache_salt, caller.is_batch, caller.priority > 2000) == (TENANT, True, True)


async def test_a_line_with_an_answer_is_not_sent_again(start: Start) -> None:
    shard, routes = Shard("a", "b", "c", answered=("a", "c")), Routes()
    start(shard, routes)
    await until(lambda: len(shard.answers) == 1)
    assert routes.asked == {"b": 1}


async def test_the_end_of_a_batch_ends_its_requests(start: Start) -> None:
    shard, routes = Shard("a", "b"), Routes(a=[0], b=[0])
    start(shard, routes)
    await until(lambda: routes.asked.total() == 2)
    shard.ended.set()
    await until(lambda: routes.num_cancelled == 2)
    assert (shard.answers, shard.failures) == ({}, [])


async def test_a_batch_without_room_for_its_answers_fails(start: Start) -> None:
    shard, routes = Shard("a", "b", "c"), Routes(c=[0])
    shard.room_for = 1
    start(shard, routes)
    await until(lambda: shard.failures == ["no_room"])
    assert routes.num_cancelled == 1


async def test_a_batch_whose_key_is_removed_fails(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ApiKeys, "of_tenant", lambda *_: None)
    shard = Shard("a")
    start(shard, Routes())
    await until(lambda: shard.failures == ["invalid_api_key"])


async def test_a_runner_goes_on_when_its_shard_was_away(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    shard, routes = Shard("a"), Routes()
    outline, num_asked = shard.outline, 0

    async def away_at_first(tenant: str, batch_id: str) -> bytes:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            shard.is_free.set()
            raise StageUnavailableError("shared", "away")
        return await outline(tenant, batch_id)

    monkeypatch.setattr(shard, "outline", away_at_first)
    start(shard, routes)
    await until(lambda: len(shard.answers) == 1)
