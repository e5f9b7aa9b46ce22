"""`raylens batch` against a real server: each request has one answer, whatever dies meanwhile."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from raylens.deployments.api.chat import ChatCompletionRequest
from raylens.deployments.batch.answer_file import AnswerFile
from raylens.deployments.batch.media_folder import MediaFolder
from raylens.deployments.batch.request_file import BatchFileError, RequestFile
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.cli import main
from raylens.preprocess.data_url import data_url
from raylens.preprocess.schema import ChatPrompt
from tests.pictures import disc, encoded, user_message
from tests.replicas import replica_pids
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
COLOURS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    return AppConfig.model_validate(
        {"model": shapes, "pooling": {"type": "mean"}, "admission": {"total": {"requests": 8}}}
    )


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"max_tokens": 8, **body}}


def question(number: int) -> dict[str, Any]:
    """About a picture that a few others have, too."""
    picture = encoded(disc(COLOURS[number % 3], (96, 96 + number % 20), (36, 36)))
    return line(f"{number}", messages=[user_message("What colour is the circle?", picture)])


def written(file: Path, lines: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return file


def command(requests: Path, answers: Path, url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "raylens", "batch", str(requests), str(answers), "--url", url, *flags]


def batch(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=280, check=False)


def answers_in(file: Path) -> dict[str, dict[str, Any]]:
    """The responses by the ids of their requests. Each is there once."""
    lines = [json.loads(one) for one in file.read_text().splitlines()]
    found = {one["custom_id"]: one["response"] for one in lines}
    assert len(found) == len(lines)
    return found


def colours(answers: dict[str, dict[str, Any]]) -> list[str]:
    return [answers[one]["body"]["choices"][0]["message"]["content"] for one in sorted(answers, key=int)]


def test_each_request_of_a_file_is_answered_as_it_would_be_alone(client: OpenAI, app_url: str, tmp_path: Path) -> None:
    picture = {"type": "input_image", "image_url": data_url(encoded(disc("red", (96, 96), (36, 36))))}
    asked: Any = [{"role": "user", "content": [picture, {"type": "input_text", "text": "What colour is the circle?"}]}]
    lines = [
        *(question(number) for number in range(24)),
        line("text", "/v1/completions", prompt="Hello"),
        {"custom_id": "response", "url": "/v1/responses", "body": {"input": asked}},
        line("message", "/v1/messages", messages=[{"role": "user", "content": "Who are you?"}]),
        line("nobody", model="nobody", messages=[{"role": "user", "content": "Hi"}]),
    ]
    result = batch(written(tmp_path / "in", lines), tmp_path / "out", app_url)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"28 answers are in {tmp_path / 'out'}, 1 of them errors"
    answers = answers_in(tmp_path / "out")
    refused = answers.pop("nobody")
    assert (refused["status_code"], refused["body"]["error"]["code"]) == (404, "model_not_found")
    assert {one["status_code"] for one in answers.values()} == {200}
    alone = client.completions.create(model="shapes", prompt="Hello", max_tokens=8)
    assert answers.pop("text")["body"]["choices"][0]["text"] == alone.choices[0].text
    assert answers.pop("response")["body"]["output"][0]["content"][0]["text"] == "red"
    assert answers.pop("message")["body"]["content"][0]["text"]
    assert colours(answers) == [COLOURS[number % 3] for number in range(24)]


PROMPT = ("--prompt", "What colour is the circle?", "--body", '{"max_tokens": 8}')


def test_each_picture_of_a_folder_is_asked_about(app_url: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "pictures", tmp_path / "out"
    (folder / "more").mkdir(parents=True)
    files = {f"{colour}.png": colour for colour in COLOURS} | {"more/Ünder.JPG": "red"}
    for name, colour in files.items():
        (folder / name).write_bytes(encoded(disc(colour, (96, 96), (36, 36))))
    (folder / "notes.txt").write_text("no picture")
    (folder / ".hidden.png").write_bytes(b"")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "a.png").write_bytes(b"")
    (folder / "broken.gif").write_bytes(b"GIF")
    result = batch(folder, out, app_url, *PROMPT)
    first, *_, last = result.stderr.splitlines()
    assert (first, last) == ("1 files with other endings are left out", f"5 answers are in {out}, 1 of them errors")
    answers = answers_in(out)
    assert answers.pop("broken.gif")["status_code"] == 400
    assert {name: one["body"]["choices"][0]["message"]["content"] for name, one in answers.items()} == files
    (folder / "late.png").write_bytes((folder / "blue.png").read_bytes())
    assert "5 of 6 requests were answered before" in batch(folder, out, app_url, *PROMPT).stderr
    assert answers_in(out)["late.png"]["body"]["choices"][0]["message"]["content"] == "blue"


def test_the_pages_of_a_folder_are_embedded(app_url: str, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(encoded(disc("red", (96, 96), (36, 36))))
    result = batch(tmp_path, tmp_path / "out", app_url, "--endpoint", "/v1/embeddings")
    assert result.returncode == 0, result.stderr
    first, second = (one["body"]["data"][0]["embedding"] for one in answers_in(tmp_path / "out").values())
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{folder}", "{out}"], "has no files that end with jpg"),
        (["{folder}", "{out}", "--body", "[]"], "--body: not an object"),
        (["{folder}", "{out}", "--body", "{"], "--body: not valid JSON"),
        (["{file}", "{out}", "--prompt", "x"], "--prompt is for a folder, and .* is none"),
    ],
)
def test_what_is_no_folder_of_media_is_said(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("raylens.deployments.launch.cli._stop_on_signals", lambda: None)
    (tmp_path / "folder").mkdir()
    places = {name: str(tmp_path / name) for name in ("folder", "file", "out")}
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["batch", *(one.format(**places) if one[-1] == "}" else one for one in arguments)]))
    assert ended.value.code == 2
    assert re.search(reason, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        (b"\xff.png", {}, r"the name '\\udcff\.png' is not UTF-8"),
        (b"a.png", {"stream": True}, "a.png: body: the answers of a batch come as a whole"),
        (b"a.png", {"messages": {}}, "--body: messages has to be a list"),
    ],
)
def test_what_no_batch_can_have_is_said_before_anything_is_sent(
    name: bytes, body: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    with pytest.raises(BatchFileError, match=reason):
        MediaFolder(tmp_path, None, body, CHAT)


def test_each_kind_of_file_has_its_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"a.PDF": "document", "b.opus": "audio", "c.jpeg": "image", "d.m4v": "video"}
    for name in (*kinds, "late.png"):
        (tmp_path / name).write_bytes(name.encode())
    opening = {"role": "system", "content": "Be brief."}
    folder = MediaFolder(tmp_path, "What?", {"messages": [opening]}, CHAT)
    (tmp_path / "late.png").unlink()
    requests = list(folder.requests(without=set()))
    assert [request.custom_id for request in requests] == [*kinds]
    for request, kind in zip(requests, kinds.values(), strict=True):
        body = ChatCompletionRequest.model_validate({"model": "m", **request.body})
        ((prompt, (source,)),) = body.prompts_and_media()
        assert source.modality == kind
        assert isinstance(prompt, ChatPrompt)
        asked = [{"type": kind}, {"type": "text", "text": "What?"}]
        assert prompt.messages == [opening, {"role": "user", "content": asked}]
    assert "late.png: No such file" in capsys.readouterr().err


def test_a_run_that_is_killed_goes_on_where_it_was(app_url: str, tmp_path: Path) -> None:
    number = 150
    requests, out = written(tmp_path / "in", map(question, range(number))), tmp_path / "out"
    with subprocess.Popen(command(requests, out, app_url)) as run:
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 20)
        run.send_signal(signal.SIGSTOP)  # a quick server answers all the rest while the second run starts
        second = batch(requests, out, app_url)
        assert (second.returncode, second.stderr) == (2, f"raylens: another `raylens batch` writes to {out}\n")
        run.kill()
    before = out.read_bytes()
    assert (num_before := before.count(b"\n")) < number
    out.write_bytes(before + b'{"id": "batch_req_of a line that was cut')
    result = batch(requests, out, app_url)
    assert result.returncode == 0
    assert result.stderr.startswith(f"{num_before} of {number} requests were answered before\n")
    assert out.read_bytes().startswith(before)
    assert colours(answers_in(out)) == [COLOURS[number % 3] for number in range(number)]
    whole = out.read_bytes()
    assert batch(requests, out, app_url).returncode == 0
    assert out.read_bytes() == whole


@pytest.mark.slow
def test_two_thousand_requests_outlive_three_replicas_and_the_run(app_url: str, tmp_path: Path) -> None:
    number = 2000
    requests, out = written(tmp_path / "in", map(question, range(number))), tmp_path / "out"

    def num_answered() -> int:
        return out.read_bytes().count(b"\n") if out.exists() else 0

    with subprocess.Popen(command(requests, out, app_url)) as run:
        for stage, reached in (("Generate", 300), ("Encode", 600), ("Ingress", 900)):
            wait_until(lambda reached=reached: num_answered() >= reached, 280)  # type: ignore[misc]
            os.kill(random.choice(replica_pids(stage)), signal.SIGKILL)
        wait_until(lambda: num_answered() >= 1200, 280)
        run.kill()
    result = subprocess.run(command(requests, out, app_url), check=False, timeout=280)
    assert result.returncode == 0
    assert colours(answers_in(out)) == [COLOURS[number % 3] for number in range(number)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1: not valid JSON"),
        ("[]", "line 1: not an object"),
        (json.dumps({"custom_id": 1}), "line 1: custom_id has to be a text"),
        (json.dumps(line("a") | {"method": "GET"}), "line 1: method has to be POST"),
        (json.dumps(line("a", "/v1/moderations")), 'line 1: url has to be one of .*, not "/v1/moderations"'),
        (json.dumps({"custom_id": "a", "url": CHAT}), "line 1: body has to be an object"),
        (json.dumps(line("a", stream=True)), "line 1: body: the answers of a batch come as a whole"),
        (f"{json.dumps(line('a'))}\n\n{json.dumps(line('a'))}", "line 3: custom_id 'a' is that of line 1"),
        ("\n", "has no requests"),
    ],
)
def test_what_is_no_file_of_requests_is_said_before_any_is_sent(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(text)
    with pytest.raises(BatchFileError, match=reason):
        RequestFile(tmp_path / "in")


def test_answers_to_other_requests_are_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with AnswerFile(out, ["a"]) as answers:
        answers.add("a", 200, "r-1", {"choices": []})
    before = out.read_bytes()
    for ids in (["b"], []):
        with (
            pytest.raises(BatchFileError, match="line 1 is not an answer to one of these requests"),
            AnswerFile(out, ids),
        ):
            pass
    assert out.read_bytes() == before
    with pytest.raises(BatchFileError, match="no/file: No such file"), AnswerFile(tmp_path / "no" / "file", []):
        pass


def test_a_full_disk_loses_no_answer(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\n"
        "from raylens.deployments.batch.answer_file import AnswerFile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))\n"
        "with AnswerFile(Path(sys.argv[1]), ['a', 'b', 'c']) as answers:\n"
        "    for one in 'abc': answers.add(one, 200, 'r-1', 'x' * 100)\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path / "out")]
    result = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert f"RuntimeError: {tmp_path / 'out'}: " in result.stderr
    assert "the same command goes on from here" in result.stderr
    assert list(answers_in(tmp_path / "out")) == ["a"]


def test_a_server_that_is_not_there_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = written(tmp_path / "in", [question(0)])
    monkeypatch.setattr("raylens.deployments.launch.cli._stop_on_signals", lambda: None)
    monkeypatch.setattr("raylens.deployments.batch.sender._AWAY_SECONDS", 1.0)
    began = time.monotonic()
    arguments = ["batch", str(requests), str(tmp_path / "out"), "--url", f"http://127.0.0.1:{free_port()}"]
    assert main(arguments) == 1
    assert time.monotonic() < began + 30
    assert "has not answered for 1 s" in capsys.readouterr().err
    assert answers_in(tmp_path / "out") == {}
