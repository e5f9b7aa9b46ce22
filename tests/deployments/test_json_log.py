"""The server's log as JSON: an object a line, in every stage with the ids of its request and of its trace."""

import json
import logging
import re
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import httpx

from raylens.deployments.operator import waterfall
from raylens.deployments.request_context import RequestContext, in_request, note_ids
from raylens.deployments.server_log import FIELDS, JsonLines
from tests.ended_servers import serving
from tests.pictures import disc, encoded, user_message
from tests.waiting import wait_until

TRACE_ID, PARENT_ID = "ab" * 16, "cd" * 8
CONTEXT = RequestContext("r-1", f"00-{TRACE_ID}-{PARENT_ID}-01")
STAGES = {"Ingress", "Shared-0", "Preprocess", "Encode", "Generate"}


def traced(file: Path, request_id: str | None = None) -> str:
    """What `raylens trace` draws."""
    drawn: list[str] = []
    assert waterfall.run(Namespace(file=file, id=request_id, svg=None), drawn.append) == 0
    return "\n".join(drawn)


def test_each_stage_logs_with_the_ids_of_the_request_and_its_trace(tmp_path: Path) -> None:
    """All of its processes get the signal to end, as systemd sends it. Nothing is left, and every line is JSON."""
    log = tmp_path / "log"
    with log.open("w") as errors, serving("--log-format", "json", "--log-level", "debug", errors=errors) as server:
        server.wait_for_line("curl ")
        url = f"{server.url}/v1/chat/completions"
        body: dict[str, Any] = {"model": "shapes", "max_tokens": 2, "stage_timings": True}
        body["messages"] = [user_message("What?", encoded(disc("red")))]
        headers = {"x-request-id": "r-1", "traceparent": CONTEXT.traceparent}
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        body["messages"] = [user_message("What?", encoded(disc("red"))[:-40])]
        httpx.post(url, json=body, headers={"x-request-id": "r-2"}, timeout=60)
        wait_until(lambda: '"r-2"' in log.read_text())
        server.send(signal.SIGTERM, "all")
        assert server.ends_in(15) == 0
    *told, last = log.read_text().splitlines()
    assert last == "raylens: stopped", "the command's own last word"
    assert [line for line in told if not line.startswith("{")] == []
    lines = [json.loads(line) for line in told]
    about = [line for line in lines if line.get("request_id") == "r-1"]
    assert {line["process"].partition("#")[0] for line in about} == STAGES
    assert {line["trace_id"] for line in about} == {TRACE_ID}
    assert all({"time", "level", "logger", "message", "span_id"} <= line.keys() for line in about)
    (access,) = [line for line in about if "status" in line]
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/chat/completions", 200)
    assert access["level"] == "info"
    assert 0 < access["first_byte_seconds"] <= access["seconds"]
    assert access["bytes_in"] > 0 < access["bytes_out"]
    told_timings = answer.json()["stage_timings"]
    assert access["stage_timings"] == told_timings
    assert {"admission_queue", "media_fetch", "processor", "encode", "prefill"} <= told_timings["seconds"].keys()
    (saved := tmp_path / "answer").write_text(answer.text)
    drawn, drawn_answer = traced(log, answer.json()["id"]), traced(saved)
    assert "POST /v1/chat/completions 200  r-1" in drawn
    assert drawn.splitlines()[3:] == traced(log, "r-1").splitlines()[3:]
    stages = [line.split()[0] for line in drawn.splitlines()[3:]]
    assert stages == [line.split()[0] for line in drawn_answer.splitlines()[3:]]
    assert {*stages} - {"decode"} == {*told_timings["seconds"]}  # both tokens may come together
    (refused,) = [line for line in lines if line.get("request_id") == "r-2" and "status" in line]
    assert (refused["status"], refused["stage"], refused["code"]) == (400, "ingress", "invalid_image")
    assert {"admission_queue", "media_fetch"} <= refused["stage_timings"]["seconds"].keys()
    assert "400 invalid_image" in traced(log, "r-2")


def record_of(message: str, *, extra: dict[str, Any] | None = None, error: Exception | None = None) -> Any:
    logger = logging.getLogger("ray.serve.x")
    info: Any = (type(error), error, error.__traceback__) if error is not None else None
    record = logger.makeRecord(logger.name, logging.INFO, "x.py", 1, message, (), info, extra=extra)
    assert note_ids(record)
    return json.loads(JsonLines("Encode#1").format(record))


def test_a_line_has_its_own_fields_and_its_error() -> None:
    try:
        raise ZeroDivisionError("over\nall")
    except ZeroDivisionError as error:
        told = record_of("two\nlines", extra={FIELDS: {"status": 500, "key": None}}, error=error)
    assert (told["message"], told["status"], told["key"]) == ("two\nlines", 500, None)
    assert (told["process"], told["level"], told["logger"]) == ("Encode#1", "info", "ray.serve.x")
    assert "ZeroDivisionError: over\nall" in told["exception"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", told["time"])


def test_ids_are_those_of_the_request_whose_block_it_is() -> None:
    with in_request(CONTEXT):
        told = record_of("a")
        with in_request(RequestContext("r-3")):
            inner = record_of("b")
    assert (told["request_id"], told["trace_id"], told["span_id"]) == ("r-1", TRACE_ID, PARENT_ID)
    assert inner["request_id"] == "r-3"
    assert "trace_id" not in inner
    assert "request_id" not in record_of("c")
