"""The process that workers are forked from, and the program that asks for them, without Ray."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raylens.deployments.cluster.worker_template import worker_template
from raylens.deployments.ray_internals import start_worker
from raylens.deployments.ray_internals.start_worker import FORKED, SOCKET_VARIABLE
from tests.signal_handlers import handled
from tests.waiting import wait_until

MODULES = ["torch", "transformers", "raylens.llm.engine", "ray", "raylens.deployments.endpoint.ingress"]
WORKER = """
import json, os, sys
from pathlib import Path
ids = []
if "ray" in sys.modules:
    from ray import WorkerID
    ids.append(WorkerID.from_random().hex())
seen = {
    "ids": ids,
    "arguments": sys.argv[1:],
    "modules": [name for name in MODULES if name in sys.modules],
    "variables": {name: os.environ.get(name) for name in ("COLOUR", "HOME", "OMP_NUM_THREADS")},
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "threads": len(os.listdir("/proc/self/task")),
}
print("worker says hello", flush=True)
Path(sys.argv[1] + ".new").write_text(json.dumps(seen))
os.rename(sys.argv[1] + ".new", sys.argv[1])
""".replace("MODULES", repr(MODULES))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with worker_template(tmp_path_factory.mktemp("template")) as variables:
        wait_until(lambda: Path(variables[SOCKET_VARIABLE]).exists())
        yield variables


def start(folder: Path, context: dict[str, object], environment: dict[str, str]) -> tuple[dict[str, object], str]:
    """Starts a worker as Ray does; returns what it saw and what it printed."""
    program, answer = folder / "worker.py", folder / "answer"
    program.write_text(WORKER)
    arguments = [f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON"]
    with subprocess.Popen(
        [sys.executable, start_worker.__file__, *arguments, str(program), str(answer)],
        env={"HOME": "/at/home", "PATH": os.environ["PATH"]} | environment,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as asking:
        output, _ = asking.communicate(timeout=60)
    assert asking.returncode == 0
    wait_until(answer.exists)
    return json.loads(answer.read_text()) | {"asked by": asking.pid}, output


def test_a_worker_is_forked_with_its_own_arguments_variables_and_output(
    template: dict[str, str], tmp_path: Path
) -> None:
    context: dict[str, object] = {"env_vars": {FORKED: "1", "COLOUR": "blue"}, "py_executable": sys.executable}
    seen, output = start(tmp_path, context, template)
    assert seen["arguments"] == [str(tmp_path / "answer")]
    assert seen["variables"] == {"COLOUR": "blue", "HOME": "/at/home", "OMP_NUM_THREADS": None}
    assert seen["modules"] == MODULES
    assert seen["threads"] == 1
    assert output == "worker says hello\n"


def test_workers_are_children_of_the_template_and_in_the_group_of_the_process_that_asked(
    template: dict[str, str], tmp_path: Path
) -> None:
    context: dict[str, object] = {"env_vars": {FORKED: "1"}}
    seen, _ = start(tmp_path, context, template)
    assert seen["parent"] != os.getpid()
    assert (
        Path(f"/proc/{seen['parent']}/cmdline").read_text().split("\0")[3]
        == "raylens.deployments.cluster.worker_template"
    )
    assert seen["group"] == seen["asked by"]


def test_a_worker_whose_program_ends_is_gone(template: dict[str, str], tmp_path: Path) -> None:
    seen, _ = start(tmp_path, {"env_vars": {FORKED: "1"}}, template)
    wait_until(lambda: not Path(f"/proc/{seen['pid']}").exists())


@pytest.mark.parametrize(
    ("environment", "variables"),
    [({}, {FORKED: "1"}), ({SOCKET_VARIABLE: "/no/such/socket"}, {FORKED: "1"})],
    ids=["no template", "template is gone"],
)
def test_without_a_template_a_worker_is_a_new_process(
    environment: dict[str, str], variables: dict[str, str], tmp_path: Path
) -> None:
    seen, _ = start(tmp_path, {"env_vars": {**variables, "COLOUR": "${HOME}!"}}, environment)
    assert seen["modules"] == []
    assert seen["variables"] == {"COLOUR": "/at/home!", "HOME": "/at/home", "OMP_NUM_THREADS": None}


def test_two_workers_draw_different_ids(template: dict[str, str], tmp_path: Path) -> None:
    """Ray names objects by them."""
    drawn: list[object] = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        drawn.append(start(tmp_path / name, {"env_vars": {FORKED: "1"}}, template)[0]["ids"])
    assert drawn[0]
    assert drawn[0] != drawn[1]


def test_a_worker_with_other_variables_of_ray_is_a_new_process(template: dict[str, str], tmp_path: Path) -> None:
    """Ray has read those of the first worker."""
    seen, _ = start(tmp_path, {"env_vars": {FORKED: "1"}}, template | {"RAY_JOB_ID": "02000000"})
    assert seen["modules"] == []


def test_only_workers_that_say_so_are_forked(template: dict[str, str], tmp_path: Path) -> None:
    seen, _ = start(tmp_path, {}, template)
    assert seen["modules"] == []


def test_an_order_that_breaks_off_does_no_harm(template: dict[str, str], tmp_path: Path) -> None:
    for part in (b"", b"\0\0\0\x05{"):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(template[SOCKET_VARIABLE])
            other.sendall(part)
    seen, _ = start(tmp_path, {"env_vars": {FORKED: "1"}}, template)
    assert seen["modules"] == MODULES


def test_a_worker_that_fails_ends_with_its_traceback(template: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("raise ValueError('no worker')")
    with (tmp_path / "errors").open("w") as errors:
        subprocess.run(
            [sys.executable, start_worker.__file__, str(tmp_path / "worker.py")],
            env={"PATH": os.environ["PATH"]} | template | {FORKED: "1"},
            stderr=errors,
            check=True,
        )
    wait_until(lambda: "ValueError: no worker" in (tmp_path / "errors").read_text())
    seen, _ = start(tmp_path, {"env_vars": {FORKED: "1"}}, template)
    assert seen["threads"] == 1


def test_the_template_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from raylens.deployments.cluster.worker_template import worker_template\n"
        "with worker_template(Path(sys.argv[1])) as variables:\n"
        "    while not Path(variables['RAYLENS_WORKER_TEMPLATE']).exists(): time.sleep(0.05)\n"
        "    os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=True)
    path = str(tmp_path / "worker-template.sock")
    wait_until(lambda: not any(path in text for text in command_lines()))


def test_a_signal_while_it_starts_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(BaseException):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stopped

    class Popen(subprocess.Popen[bytes]):
        """A process whose start a signal interrupts."""

        started: list["Popen"] = []

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with handled(signal.SIGTERM, stop), pytest.raises(Stopped), worker_template(tmp_path):
        pytest.fail("the signal was lost")
    assert [process.returncode for process in Popen.started] == [-signal.SIGKILL]


def command_lines() -> list[str]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_text(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return lines
