"""The command line as people type it, in processes of its own."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from raylens.checkpoints import BUNDLED_MODEL
from raylens.cpu_kernels.library import VARIABLE
from raylens.deployments.cluster.server_processes import pids_of
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.cli import main
from tests.listening import server_folder
from tests.otlp_collector import collecting

ROOT = Path(__file__).parent.parent.parent
RAYLENS = Path(sys.executable).with_name("raylens")


def run(*arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RAYLENS, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def test_help_teaches() -> None:
    assert "serve" in run("--help").stdout
    text = run("serve", "--help").stdout
    for part in (
        "--model",
        "--port",
        "--config",
        "--api-key",
        "--log-format",
        "coloured shapes",
        "ray up cluster.yaml",
    ):
        assert part in text
    text = run("trace", "--help").stdout
    for part in ("X-Request-Id", "--log-format json", "--svg waterfall.svg", "--id", "docs/tracing.md"):
        assert part in text
    text = run("deploy", "--help").stdout
    for part in ("serve.yaml", "--host 0.0.0.0", "--timeout", "--no-wait", "Exits 1 when a stage does not start"):
        assert part in text


def test_a_shell_completes_commands_arguments_and_values() -> None:
    script = run("completion", "bash").stdout
    for words, completed in (
        (["se"], ["serve"]),
        (["serve", "--log-f"], ["--log-format"]),
        (["serve", "--log-format", ""], ["text", "json"]),
    ):
        typed = " ".join(f"'{word}'" for word in ["raylens", *words])
        ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _shtab_raylens; echo ${{COMPREPLY[@]}}"
        told = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True, timeout=60
        )
        assert told.stdout.split() == completed


def test_it_says_its_version() -> None:
    assert re.fullmatch(r"raylens \d+\.\d+\.\d+\S*\n", run("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--model", "/no/such"], "--model /no/such: no such folder"),
        (["serve", "--port", "70000"], "not between 0 and 65535"),
        (["serve", "--port", "x"], "invalid"),
        (["serve", "/no/such"], "--model /no/such: no such folder"),
        (["serve", "a/b", "--model", "c/d"], "named twice: a/b and --model c/d"),
        (["serve", str(BUNDLED_MODEL), "/no/such"], "--model /no/such: no such folder"),
        (["serve", "a/b", "c/d", "--dtype", "float32"], "--dtype concerns one model: settings of several go into"),
        (["serve", "--host", "no such host"], "--host no such host: "),
        (["serve", "--host", "192.0.2.1"], "192.0.2.1 is no address of this machine"),
        (["serve", "--dtype", "float7"], "--dtype: Input should be 'auto', 'float32'"),
        (["serve", "--set", "generate.num_gpus"], "'generate.num_gpus' is not NAME=VALUE"),
        (["serve", "--num-cpus", "1"], "there is no argument --num-cpus; `raylens serve` takes any setting of"),
        (["serve", "--log-level", "loud"], "invalid choice: 'loud'"),
        (["serve", "--log-format", "xml"], "invalid choice: 'xml'"),
        (["top", "--num-gpus", "1"], "unrecognized arguments: --num-gpus 1"),
        (["trace", "--id"], "--id: expected one argument"),
        (["deploy", "/no/such.yaml"], "/no/such.yaml: No such file or directory"),
        (["deploy", "--timeout", "-1"], "-1 is not a number of seconds above 0"),
        (["nonsense"], "invalid choice"),
        ([], "required"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "raylens.deployments.launch.cli._stop_on_signals", lambda: None
    )  # the signals of this process stay as they are
    assert _status(arguments) == 2
    assert message in capsys.readouterr().err


def _status(arguments: list[str]) -> object:
    try:
        return main(arguments)
    except SystemExit as end:  # the argument parser's
        return end.code


def test_the_demo_answers_right_and_shows_every_stage() -> None:
    result = run("demo")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"(\d+) of \1 answers are right", result.stdout)
    assert "WRONG" not in result.stdout
    for part in ("media", "processor", "encode", "prefill", "first token", "from the cache", "every stage is ready"):
        assert part in result.stdout


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = run("serve", "--port", str(other.getsockname()[1]))
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"raylens: cannot listen on 127\.0\.0\.1, port \d+: Address already in use\n", result.stderr)


def test_progress_is_told_at_once_also_into_a_pipe() -> None:
    code = "from raylens.deployments.launch.local_cluster import os, print_at_once; print_at_once('here'); os._exit(0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "here\n"


@contextmanager
def started(*arguments: str, folder: Path = ROOT) -> Iterator[subprocess.Popen[str]]:
    """`raylens serve` in the folder, as shells start what runs in the background."""
    with subprocess.Popen(
        [RAYLENS, "serve", "--port", "0", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as server:
        try:
            yield server
        finally:
            server.kill()  # if the test has failed


@pytest.mark.parametrize(
    "last",
    [
        "starting Ray",
        pytest.param("starting Ray Serve", marks=pytest.mark.slow),
        pytest.param("ingress loading", marks=pytest.mark.slow),
    ],
)
def test_to_be_stopped_during_the_start_is_one_line(last: str) -> None:
    with started() as server:
        assert server.stdout is not None
        assert any(last in line for line in iter(server.stdout.readline, ""))
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
    assert (server.returncode, errors) == (0, "raylens: stopped\n")


def test_to_be_stopped_inside_code_that_is_compiled_on_the_way_is_no_failure(tmp_path: Path) -> None:
    """As imports have it; Python would end with the signal's status after a plain KeyboardInterrupt."""
    (tmp_path / "stopped.py").write_text(
        "from raylens.deployments.launch import cli\n"
        "cli._demo = lambda args: exec('import os, signal; os.kill(os.getpid(), signal.SIGTERM)')\n"
        "raise SystemExit(cli.main(['demo']))\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "stopped"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "raylens: stopped\n")


def test_serve_prints_a_curl_line_that_works_and_stops_cleanly(
    shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder whose modules have the names of some that the server imports."""
    for name in ("deployments", "encoder", "json", "llm", "numpy", "ray", "raylens", "torch", "transformers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} of the working folder')")
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # so that spans are sent at the end
    flags = ("--api-key", "it's a key", "--served-model-name", "forms", "--max-model-len", "700")
    with collecting(port) as collector, started(shapes, *flags, folder=tmp_path) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        curl = next((line for line in iter(server.stdout.readline, "") if line.startswith("curl ")), "")
        assert curl, server.stderr.read()
        answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
        assert '"finish_reason":"stop"' in answer
        found = re.search(r"http://[^/]+", curl)
        assert found is not None
        url = found.group()
        folder = server_folder(server.pid)
        assert folder.is_dir()
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in pids_of(folder)]
        assert any(environments)
        # A process that is ending has none.
        assert all(b"PYTHONSAFEPATH=1" in variables.split(b"\0") for variables in environments if variables)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        headers = {"authorization": "Bearer it's a key", "x-request-id": "mine"}
        (model,) = httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("forms", 700)
        assert httpx.post(f"{url}/v1/completions", json={"model": "x", "prompt": ""}, headers=headers).is_client_error
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
        senders = {span.place.partition("#")[0] for span in collector.spans}
    assert server.returncode == 0
    assert senders == {"Ingress", "Shared-0", "Preprocess", "Encode", "Generate"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert not folder.exists(), "it leaves nothing behind"
    lines = errors.splitlines()
    assert lines.pop() == "raylens: stopped"
    assert all(re.match(r"\d\d:\d\d:\d\d INFO ingress: (GET|POST) ", line) for line in lines), errors
    assert any("POST /v1/chat/completions 200" in line for line in lines)
    (refused,) = [line for line in lines if "POST /v1/completions 404 mine" in line]
    assert "'x' is not served here" in refused
    assert not any("/health" in line or "heartbeat" in line for line in lines)


@pytest.mark.slow
def test_two_models_are_served_together_and_the_log_tells_their_stages_apart(
    shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")  # of which each stage warns
    other = shutil.copytree(shapes, tmp_path / "other")
    with started(shapes, str(other)) as server:
        assert server.stdout is not None
        ready = next(line for line in iter(server.stdout.readline, "") if " ready at " in line)
        found = re.fullmatch(r"shapes and other are ready at (http://.*)/v1  .*\n", ready)
        assert found is not None
        models = httpx.get(f"{found[1]}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["shapes", "other"]
        for model in ("shapes", "other"):
            body = {"model": model, "prompt": "Hello", "max_tokens": 1}
            assert httpx.post(f"{found[1]}/v1/completions", json=body, timeout=60).status_code == 200
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
    said = re.findall(r"WARNING (\S+): Raylens' kernels for the CPU are not in use", errors)
    assert sorted(said) == ["encode", "encode-other", "generate", "generate-other"]


@pytest.mark.slow
def test_without_kernels_it_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package was installed without a compiler."""
    monkeypatch.setenv(VARIABLE, "off")
    with started() as server:
        assert server.stdout is not None
        assert server.stderr is not None
        curl = next((line for line in iter(server.stdout.readline, "") if line.startswith("curl ")), "")
        assert curl, server.stderr.read()
        answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
        assert '"finish_reason":"stop"' in answer
        found = re.search(r"http://[^/]+", curl)
        assert found is not None
        told = {"cpu_kernels": f"none: {VARIABLE} is off"}
        assert httpx.get(f"{found.group()}/health").json()["details"] == {"encode": told, "generate": told}
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
    said = re.findall(r"WARNING (\w+): Raylens' kernels for the CPU are not in use: (.*)\.", errors)
    assert sorted(said) == [
        (stage, f"{VARIABLE} is off. PyTorch computes, more slowly") for stage in ("encode", "generate")
    ], errors
