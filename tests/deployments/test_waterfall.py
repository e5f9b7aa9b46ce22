"""One request's waterfall, as text and as a drawing, and what `raylens trace` says where there is none."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from raylens.deployments.api.traces import Trace, TraceSpan
from raylens.deployments.launch.cli import main
from raylens.deployments.operator.running_server import KEY_VARIABLE
from raylens.deployments.operator.waterfall import as_svg, as_text
from tests.stub_server import Answer, StubServer

BEGIN = 1_795_690_140.0


def span(
    stage: str, start_ms: float, ms: float, place: str = "Encode#1", part: str = "", detail: str = ""
) -> TraceSpan:
    return TraceSpan(
        stage=stage, started_at=BEGIN + start_ms / 1e3, seconds=ms / 1e3, place=place, part=part, detail=detail
    )


def trace(*spans: TraceSpan, error: str | None = None) -> Trace:
    return Trace(
        request_id="r-1",
        trace_id="ab" * 16,
        method="POST",
        path="/v1/chat/completions",
        model="<small>",
        status=200,
        error=error,
        started_at=BEGIN,
        seconds=0.1,
        prompt_tokens=20,
        completion_tokens=4,
        spans=list(spans),
    )


SPANS = (
    span("media_fetch", 0, 10, "Ingress#a"),
    span("item", 10, 50, "Shared-0#b", "messages[0].content[0]"),
    span("encode", 20, 25, part="messages[0].content[0]"),
    span("item", 10, 1, "Shared-0#b", "messages[0].content[1]", "embeddings cached"),
    span("decode", 99.9, 0.1, "Generate#c"),
)


def test_each_stage_has_a_line_with_a_bar_of_its_length() -> None:
    lines = as_text(trace(*SPANS), 120).splitlines()
    assert "200" in lines[0]
    assert "100.0 ms" in lines[0]
    assert "r-1" in lines[1]
    rows = lines[4:9]
    assert [row.split()[0] for row in rows] == ["media_fetch", "item", "encode", "item", "decode"]
    assert [row.partition(" ms")[0].split()[-1] for row in rows] == ["10.0", "50.0", "25.0", "1.0", "0.1"]
    assert max(map(len, lines)) <= 120
    fetch, encode, decode = rows[0], rows[2], rows[4]
    assert 2.2 < encode.count("█") / fetch.count("█") < 2.8
    assert encode.index("█") > fetch.index("█")
    assert decode.count("░") == 1, "what is short has a bar, too"


def test_items_are_told_apart() -> None:
    text = as_text(trace(*SPANS), 120)
    assert "encode [0]" in text
    assert "item [1]" in text
    assert "[0] messages[0].content[0]" in text
    assert "Shared-0, embeddings cached" in text
    assert "[0]" not in as_text(trace(*SPANS[:3]), 120).replace("content[0]", "").replace("messages[0]", "")


def test_a_narrow_terminal_has_bars_nevertheless() -> None:
    assert "█" in as_text(trace(*SPANS), 10)


def test_a_request_without_a_stage_has_a_waterfall() -> None:
    assert "overloaded" in as_text(trace(error="overloaded_queue"), 80)
    ElementTree.fromstring(as_svg(trace()))


def test_the_drawing_is_svg_with_bars_to_scale() -> None:
    root = ElementTree.fromstring(as_svg(trace(*SPANS)))
    space = "{http://www.w3.org/2000/svg}"
    bars = [one for one in root.iter(f"{space}rect") if one.find(f"{space}title") is not None]
    widths = [float(bar.get("width", 0)) for bar in bars]
    starts = [float(bar.get("x", 0)) for bar in bars]
    assert widths[1] == pytest.approx(5 * widths[0], rel=0.01)
    assert starts[2] - starts[0] == pytest.approx(2 * widths[0], rel=0.01)
    assert len({bar.get("fill") for bar in bars}) == 4, "a colour for each deployment"
    assert "<small>" in "".join(root.itertext()), "names are escaped"


@pytest.fixture(autouse=True)
def _own_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylens.deployments.launch.cli._stop_on_signals", lambda: None)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_it_asks_with_a_key_and_writes_a_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one.svg"
    asked = []

    def answer(path: str, headers: dict[str, str]) -> Answer:
        asked.append((path, headers.get("authorization")))
        return Answer(trace(*SPANS).model_dump_json().encode())

    with StubServer(answer) as server:
        assert main(["trace", "a/b", "--url", f"{server.url}/", "--api-key", "secret", "--svg", str(file)]) == 0
        assert main(["trace", "r", "--url", server.url, "--json"]) == 0
    assert asked == [("/v1/traces/a%2Fb", "Bearer secret"), ("/v1/traces/r", None)]
    assert "media_fetch" in file.read_text()
    out = capsys.readouterr().out
    assert "media_fetch" in out.splitlines()[4]
    assert json.loads(out.splitlines()[-1])["request_id"] == "r-1"


@pytest.mark.parametrize(
    ("answer", "arguments", "message"),
    [
        (Answer(b'{"error": {"message": "no request \'r\' of this key"}}', 404), [], "no request 'r' of this key"),
        (Answer(b"<html>"), [], "does not answer as this version of Raylens does"),
        (
            Answer(trace().model_dump_json().encode()),
            ["--svg", "/no/such/x.svg"],
            "/no/such/x.svg: No such file or directory",
        ),
    ],
)
def test_what_is_wrong_is_said(
    answer: Answer, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with StubServer(lambda path, headers: answer) as server:
        assert main(["trace", "r", "--url", server.url, *arguments]) == 1
    assert message in capsys.readouterr().err
