"""A replica of each stage is killed under load: what can be sent again is, and the service comes back by itself."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, APIError, OpenAI
from ray import serve

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import APP_NAME
from tests.asking_clients import AskingClients
from tests.background import Background
from tests.metric_values import samples
from tests.replicas import proxy_pids, replica_pids, stopped, worker_pids
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def keeps_app_as_it_is() -> bool:
    return False


def wait_for_new_replica(deployment: str, killed: int, timeout: float = 90) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        # The status stays HEALTHY while a new replica starts.
        states = serve.status().applications[APP_NAME].deployments[deployment].replica_states
        pids = replica_pids(deployment)
        if pids and killed not in pids and states.keys() == {"RUNNING"}:
            return
        time.sleep(0.5)
    raise AssertionError(f"no new replica of {deployment}")


@pytest.mark.parametrize(
    "deployment",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in ("Preprocess", "Generate")), "Encode", "Ingress"],
)
def test_the_service_survives_the_death_of_a_replica(
    client: OpenAI, app_url: str, app_config: AppConfig, deployment: str
) -> None:
    stage = deployment.lower()
    with AskingClients(client) as load, StageStates(app_url, stage) as states:
        load.wait_for(8, timeout=60)
        pid = replica_pids(deployment)[0]
        os.kill(pid, signal.SIGKILL)
        wait_for_new_replica(deployment, pid)
        wait_until_healthy(app_url)
        load.wait_for(20, timeout=60)
    assert load.wrong == []
    if deployment in ("Preprocess", "Encode"):
        # Nothing of a request is lost with these: the ingress sends it again, unless the stage is away for longer.
        assert all("stage is not available" in message for _, message in load.errors)
        was_away_for_long = states.longest_absence > app_config.ingress.away_timeout_s - 1
        again = samples(app_url, "items_recomputed_total")
        assert was_away_for_long or not load.errors, f"away for {states.longest_absence} s, sent again: {again}"
    wait_until_healthy(app_url)


class StageStates(Background):
    """What `/health` tells of a stage while the block runs. `longest_absence`: without a replica, in seconds."""

    def __init__(self, app_url: str, stage: str) -> None:
        super().__init__(self._watch)
        self._url, self._stage = f"{app_url}/health", stage
        self.longest_absence = 0.0

    def _watch(self) -> None:
        seen = time.monotonic()
        while not self.is_over.wait(0.1):
            try:
                state = httpx.get(self._url, timeout=30).json()["stages"].get(self._stage)
            except (httpx.TransportError, ValueError, KeyError):  # HAProxy's answer, or none
                state = None
            now = time.monotonic()
            if state == "absent":
                self.longest_absence = max(self.longest_absence, now - seen)
            else:
                seen = now


def wait_until_healthy(app_url: str) -> float:
    """Waits until the server has been healthy for two seconds: HAProxy hears of a new ingress some time after Ray Serve
    has it. Returns the moment at which these seconds began."""
    deadline, moments = time.monotonic() + 30, list[float]()
    while len(moments) < 10:
        assert time.monotonic() < deadline
        moments = [*moments, time.monotonic()] if httpx.get(f"{app_url}/health").status_code == 200 else []
        time.sleep(0.2)
    return moments[0]


def test_with_nobody_behind_haproxy_every_error_is_json_and_says_when_to_come_again(app_url: str) -> None:
    """Neither the ingress nor Ray Serve's own proxy, which takes its place for a while."""
    (pid,) = replica_pids("Ingress")
    for victim in (pid, *worker_pids("ProxyActor")):
        os.kill(victim, signal.SIGKILL)
    answers: list[httpx.Response] = []
    num_dropped = 0
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (len(answers) > 5 and answers[-1].status_code == 200):
        for path in ("/health", "/v1/models"):
            try:
                answers.append(httpx.get(app_url + path, timeout=60))
            except httpx.RemoteProtocolError:  # a connection to the HAProxy that makes way for the next one
                num_dropped += 1
        time.sleep(0.2)
    assert num_dropped <= 2
    refusals = [answer for answer in answers if answer.status_code != 200]
    assert refusals, "it was away for a while"
    for answer in refusals:
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/json")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "server_error"
    wait_for_new_replica("Ingress", pid)
    wait_until_healthy(app_url)


@pytest.mark.parametrize("victim", ["HAProxy", pytest.param("HAProxyManager", marks=pytest.mark.slow)])
def test_a_dead_haproxy_is_replaced_within_seconds(client: OpenAI, app_url: str, victim: str) -> None:
    """Connections are refused meanwhile. Nobody is told that there is no such page."""
    before = proxy_pids()
    for pid in before if victim == "HAProxy" else worker_pids(victim):
        os.kill(pid, signal.SIGKILL)
    died_at, statuses = time.monotonic(), list[int]()
    while 200 not in statuses:
        assert time.monotonic() < died_at + 60
        try:
            answer = httpx.get(f"{app_url}/v1/models", timeout=5)
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        if proxy_pids() != before:
            statuses.append(answer.status_code)
    assert time.monotonic() - died_at < 20
    assert set(statuses) <= {200, 503}
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before))  # HAProxy ends with its manager
    wait_until_healthy(app_url)


def test_the_controller_s_death_costs_no_request(client: OpenAI, app_url: str) -> None:
    (pid,) = worker_pids("ServeController")
    with AskingClients(client) as load:
        load.wait_for(4, timeout=60)
        os.kill(pid, signal.SIGKILL)
        load.wait_for(30, timeout=60)
    assert (load.wrong, load.errors) == ([], [])
    wait_until(lambda: worker_pids("ServeController") not in ([], [pid]))
    wait_until_healthy(app_url)


@pytest.mark.parametrize(
    "prompts",
    [pytest.param("Hello", marks=pytest.mark.slow), ["Hello", "Good day"]],
    ids=["one prompt", "two prompts"],
)
def test_a_stream_that_is_cut_ends_with_an_error_event(client: OpenAI, app_url: str, prompts: str | list[str]) -> None:
    (pid,) = replica_pids("Generate")
    stream: Any = client.completions.create(
        model="shapes", prompt=prompts, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
    )
    pieces = iter(stream)
    for _ in range(3):
        next(pieces)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(APIError, match="generate stage is not available"):
        for _ in pieces:
            pass
    httpx.get(f"{app_url}/health", timeout=10)  # answers, whatever it says
    wait_for_new_replica("Generate", pid)
    wait_until_healthy(app_url)


def test_an_answer_that_nobody_has_seen_is_made_again_elsewhere(
    client: OpenAI, app_url: str, app_config: AppConfig
) -> None:
    """Its replica dies in the middle of it. A client that does not stream notices nothing, unless the replacement comes
    too late."""

    def answer(**more: Any) -> Any:
        return client.completions.create(
            model="shapes", prompt="Hello", max_tokens=1900, temperature=0, extra_body={"ignore_eos": True}, **more
        )

    expected = answer(n=2)
    (pid,) = replica_pids("Generate")
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(answer, n=2)
        beside = iter(answer(stream=True))
        for _ in range(20):  # the same steps compute the answer
            next(beside)
        assert not begun.done()
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        wait_for_new_replica("Generate", pid)
        is_replaced_in_time = wait_until_healthy(app_url) - killed < app_config.ingress.away_timeout_s - 1
        if is_replaced_in_time or begun.exception() is None:
            again = begun.result()
            assert [one.text for one in again.choices] == [one.text for one in expected.choices]
            assert again.usage == expected.usage
        else:
            assert "generate stage is not available" in str(begun.exception())


def test_streams_of_a_killed_ingress_are_cut_without_an_event(client: OpenAI, app_url: str) -> None:
    (pid,) = replica_pids("Ingress")
    streams: list[Any] = [
        client.completions.create(
            model="shapes", prompt=f"Hello {n}", stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
        )
        for n in range(4)
    ]
    for stream in streams:
        next(iter(stream))
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(APIConnectionError):
            list(stream)
    wait_for_new_replica("Ingress", pid)
    wait_until_healthy(app_url)


def test_every_stream_of_a_killed_replica_ends_with_its_own_error_event(client: OpenAI, app_url: str) -> None:
    """They share the connection from the replica to the ingress."""
    (pid,) = replica_pids("Generate")
    begun = threading.Barrier(33)

    def read(number: int) -> str:
        stream: Any = client.completions.create(
            model="shapes", prompt=f"Hello {number}", stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
        )
        pieces = iter(stream)
        next(pieces)
        begun.wait(60)
        try:
            for _ in pieces:
                pass
        except APIError as error:
            return error.message
        return "came to its end"

    with ThreadPoolExecutor(32) as pool:
        reads = [pool.submit(read, number) for number in range(32)]
        begun.wait(60)
        os.kill(pid, signal.SIGKILL)
        assert [one.result() for one in reads] == ["the generate stage is not available, try again"] * 32
    wait_for_new_replica("Generate", pid)
    wait_until_healthy(app_url)


def test_health_and_requests_are_503_while_a_stage_is_away(client: OpenAI, app_url: str) -> None:
    """The engine is stopped, not killed: its replica lives on but shows no heartbeat."""
    (pid,) = replica_pids("Generate")
    body = {"model": "shapes", "prompt": "Hello", "max_tokens": 1}
    with stopped(pid):
        # It waits until the stage counts as away, and five seconds more.
        refusals = [httpx.post(f"{app_url}/v1/completions", json=body, timeout=30) for _ in range(2)]
        assert [one.status_code for one in refusals] == [503, 503]
        assert all(int(one.headers["retry-after"]) >= 1 for one in refusals)
        assert refusals[0].json()["error"]["message"] == "the generate stage is not available, try again"
        assert refusals[1].elapsed.total_seconds() < 3, "known to be away"
        deadline = time.monotonic() + 30
        while (response := httpx.get(f"{app_url}/health")).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert response.status_code == 503
        assert response.json()["stages"]["generate"] == "unresponsive"
    wait_until_healthy(app_url)
