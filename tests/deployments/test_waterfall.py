"""One request's waterfall, as text and as a drawing, and the command `raylens trace` that draws it."""

import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from raylens.deployments.launch.cli import main
from raylens.deployments.operator.waterfall import TimedRequest, as_svg, as_text, bars, timed_request

TIMINGS: dict[str, Any] = {
    "seconds": {"media_fetch": 0.01, "processor": 0.02, "render": 0.001, "encode": 0.03, "prefill": 0.015},
    "time_to_first_token": 0.08,
    "total": 0.1,
    "processor_cache_hits": 0,
    "embedding_cache_hits": 1,
}
LINE = {
    "message": "...",
    "request_id": "r-1",
    "response_id": "chatcmpl-r-1",
    "model": "<small>",
    "method": "POST",
    "path": "/v1/chat/completions",
    "status": 200,
    "seconds": 0.1,
    "stage_timings": TIMINGS,
}
ANSWER = {"id": "chatcmpl-r-1", "object": "chat.completion", "choices": [], "stage_timings": TIMINGS}


def request_of(**fields: Any) -> TimedRequest:
    found = timed_request(json.dumps(LINE | fields))
    assert found is not None
    return found


def test_stages_follow_each_other_to_the_embeddings_and_end_with_the_first_token() -> None:
    placed = {bar.stage: (round(bar.start, 6), round(bar.seconds, 6)) for bar in bars(request_of().stage_timings)}
    assert placed == {
        "media_fetch": (0, 0.01),
        "processor": (0.01, 0.02),
        "render": (0.03, 0.001),
        "encode": (0.03, 0.03),
        "prefill": (0.065, 0.015),
        "decode": (0.08, 0.02),
    }


def test_each_stage_has_a_line_with_a_bar_of_its_length() -> None:
    lines = as_text(request_of(), 120).splitlines()
    assert lines[0].startswith("POST /v1/chat/completions 200  r-1")
    assert "first token after 80.0 ms, all after 100.0 ms, 1 items from the caches" in lines[1]
    rows = lines[3:]
    assert [row.split()[0] for row in rows] == ["media_fetch", "processor", "render", "encode", "prefill", "decode"]
    assert [row.removesuffix(" ms").split()[-1] for row in rows] == ["10.0", "20.0", "1.0", "30.0", "15.0", "20.0"]
    assert max(map(len, lines)) <= 120
    assert 2.7 < rows[3].count("█") / rows[0].count("█") < 3.3
    assert rows[3].index("█") > rows[1].index("█")
    assert rows[2].count("█") == 1, "the shortest stage has a bar, too"


def test_a_narrow_terminal_has_bars_nevertheless() -> None:
    assert "█" in as_text(request_of(), 10)


def test_a_refused_request_has_a_waterfall() -> None:
    timings = TIMINGS | {"seconds": {"admission_queue": 0.05}, "time_to_first_token": 0.0, "total": 0.0}
    refused = request_of(status=503, code="overloaded_queue", stage_timings=timings)
    assert "503 overloaded_queue" in as_text(refused, 80)
    ElementTree.fromstring(as_svg(refused))


def test_the_drawing_is_svg_with_bars_to_scale() -> None:
    root = ElementTree.fromstring(as_svg(request_of()))
    space = "{http://www.w3.org/2000/svg}"
    drawn = [one for one in root.iter(f"{space}rect") if one.find(f"{space}title") is not None]
    widths, starts = ([float(bar.get(name, 0)) for bar in drawn] for name in ("width", "x"))
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    assert starts[2] - starts[0] == pytest.approx(3 * widths[0], rel=0.01)
    assert len({bar.get("fill") for bar in drawn}) == 4, "a colour for each deployment"
    assert "<small>" in "".join(root.itertext()), "names are escaped"


@pytest.fixture(autouse=True)
def _own_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylens.deployments.launch.cli._stop_on_signals", lambda: None)


@pytest.mark.parametrize(
    "document",
    [
        json.dumps(LINE),
        json.dumps(ANSWER),
        json.dumps(ANSWER, indent=2),
        f"data: {json.dumps(ANSWER | {'stage_timings': None})}\n\ndata: {json.dumps(ANSWER)}\n\ndata: [DONE]\n",
    ],
    ids=["log line", "answer", "answer of several lines", "stream"],
)
def test_it_draws_what_it_reads(
    document: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(document))
    assert main(["trace"]) == 0
    out = capsys.readouterr().out
    assert out.count("media_fetch") == 1
    assert "chatcmpl-r-1" in out


def test_of_a_log_it_draws_all_or_the_one_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, drawing = tmp_path / "log", tmp_path / "one.svg"
    other = LINE | {"request_id": "r-2", "response_id": "cmpl-own"}
    lines = ["starting Ray", json.dumps({"request_id": "r-1", "message": "encoded"}), *map(json.dumps, (LINE, other))]
    log.write_text("\n".join(lines))
    drawn = {}
    for arguments in ((), ("--id", "r-1"), ("--id", "chatcmpl-r-1"), ("--id", "cmpl-own", "--svg", str(drawing))):
        assert main(["trace", str(log), *arguments]) == 0
        out = capsys.readouterr().out
        drawn[arguments[1:2]] = [one for one in ("  r-1", "  r-2") if one in out]
    assert drawn == {
        (): ["  r-1", "  r-2"],
        ("r-1",): ["  r-1"],
        ("chatcmpl-r-1",): ["  r-1"],
        ("cmpl-own",): ["  r-2"],
    }
    assert "r-2" in drawing.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{log}", "--id", "r-3"], "no request r-3 with stage times in {log}"),
        ([], "no request with stage times in standard input"),
        (["/no/such/log"], "/no/such/log: No such file or directory"),
        (["{log}", "--svg", "/no/such/x.svg"], "/no/such/x.svg: No such file or directory"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("{}\n"))
    log = tmp_path / "log"
    log.write_text(json.dumps(LINE))
    assert main(["trace", *(one.format(log=log) for one in arguments)]) == 1
    assert message.format(log=log) in capsys.readouterr().err
