"""`raylens node`: starts Ray on one node of a cluster, with the environment that Raylens needs there.

The private folder `~/.raylens` has HAProxy's files, uploads and, on the head node, Ray's state of the cluster, from
which a restarted head continues. HAProxy outlives Ray, with the endpoint's port, until a small process ends it."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from raylens.deployments.cluster.haproxy import allow_open_files, haproxy_environment
from raylens.deployments.cluster.private_files import keep_ray_token_private
from raylens.deployments.cluster.server_processes import own_processes
from raylens.deployments.item_store.kept_files import FOLDER_VARIABLE
from raylens.deployments.ray_internals.environment import RAY_ENVIRONMENT, head_storage

_CODE = (
    *("constraints.txt", "pyproject.toml", "setup.py"),
    *("checkpoints", "cpu_kernels", "preprocess", "modeling", "encoder", "llm", "deployments", "raylens"),
)
"""Files and folders that a node installs, or reads code, pages and the bundled model from."""
_COMPILED = (".pyc", ".so")
_NUM_STARTS = 3
_NOT_STARTED = 1
"""The status of `ray start` after an error. Of wrong arguments it is 2."""
_MARK = "started"  # the file with the hash of the node's last start
_LOOK_SECONDS = 2.0
_NUM_LOOKS = 2  # without a raylet, after which Ray has ended and is not just restarting


def start_node(arguments: Sequence[str]) -> int:
    """Runs `ray start` and returns its status, unless Ray runs here with the same arguments and code."""
    keep_ray_token_private(Path.home(), make=False)
    folder = Path.home() / ".raylens"
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    mark, kind = folder / _MARK, kind_of_start(arguments, Path(__file__).parents[3])
    if _ray_runs() and mark.is_file() and mark.read_text() == kind:
        print("Ray already runs on this node, with the same arguments and code")
        return 0
    _ray(["stop"], os.environ)
    end_orphans(folder)
    for left_over in folder.iterdir():
        if not left_over.is_dir():
            left_over.unlink()
    if (warning := allow_open_files()) is not None:
        print(warning)
    environment = node_environment(folder, is_head="--head" in arguments) | os.environ
    status = start_ray(arguments, environment)
    if status == 0:
        mark.write_text(kind)
        watcher = [sys.executable, "-P", "-m", "raylens.deployments.launch.node", str(folder)]
        nowhere = subprocess.DEVNULL
        subprocess.Popen(watcher, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
    return status


def start_ray(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs `ray start` and returns its status. Tries again if Ray does not start, as on a busy machine, where its
    processes take longer than it waits for them: Ray's autoscaler would never come back to the node."""
    for number in range(_NUM_STARTS):
        if number:
            print("Ray did not start; trying again", flush=True)
            _ray(["stop"], os.environ)
        if (status := _ray(["start", *arguments], environment)) != _NOT_STARTED:
            break
    return status


def node_environment(folder: Path, *, is_head: bool) -> dict[str, str]:
    """Returns Ray's environment on a node. All nodes need the same token in `~/.ray/auth_token`."""
    variables = {
        **RAY_ENVIRONMENT,
        **haproxy_environment(folder),
        FOLDER_VARIABLE: str(folder),
        "RAY_AUTH_MODE": "token",
    }
    if is_head:
        (folder / "gcs").mkdir(mode=0o700, exist_ok=True)
        variables |= head_storage(folder / "gcs")
    return variables


def end_orphans(folder: Path) -> None:
    """Kills the HAProxy whose files are in the folder."""
    for pid, words in own_processes("cmdline"):
        if Path(words[0]).name == "haproxy" and any(Path(word).is_relative_to(folder) for word in words):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def watch(folder: Path) -> None:
    """Waits until Ray has ended on this node, then ends its HAProxy and any remaining Ray agents."""
    num_unseen = 0
    while num_unseen < _NUM_LOOKS:
        time.sleep(_LOOK_SECONDS)
        num_unseen = 0 if _ray_runs() else num_unseen + 1
    end_orphans(folder)
    _ray(["stop"], os.environ)


def _ray(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    program = shutil.which("ray")
    if program is None:
        raise RuntimeError("there is no program `ray` here: run this command in Raylens' environment")
    return subprocess.run([program, *arguments], env=environment, check=False).returncode


def _ray_runs() -> bool:
    return any(Path(words[0]).name == "raylet" for _, words in own_processes("cmdline"))


def kind_of_start(arguments: Sequence[str], root: Path) -> str:
    """Returns a hash of the arguments, the autoscaler's file, and the code below `root` except compiled files."""
    digest = hashlib.sha256("\0".join(arguments).encode())
    named = [Path(one.partition("=")[2]).expanduser() for one in arguments if one.startswith("--autoscaling-config=")]
    code = sorted(file for name in _CODE for file in ((root / name), *(root / name).rglob("*")))
    for file in [*(one for one in code if one.suffix not in _COMPILED), *named]:
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"\0{file}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
