"""`raylens node`: starts Ray on one node of a cluster, with the environment that Raylens needs there.

The node keeps its files in one folder of this user alone, `~/.raylens`: HAProxy's files and sockets, uploaded files,
and, on the head node, Ray's state of the cluster, from which a restarted head continues.

HAProxy outlives `ray stop` and `ray down`, and would keep the endpoint's port. So a small process watches Ray, and ends
the leftovers once Ray has ended."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from raylens.deployments.cluster.haproxy import haproxy_environment
from raylens.deployments.cluster.open_files import allow_open_files
from raylens.deployments.cluster.private_files import keep_ray_token_private
from raylens.deployments.item_store.uploads import FOLDER_VARIABLE
from raylens.deployments.ray_internals.environment import RAY_ENVIRONMENT, head_storage

_CODE = (
    *("constraints.txt", "pyproject.toml", "setup.py"),
    *("checkpoints", "cpu_kernels", "preprocess", "modeling", "encoder", "llm", "deployments", "raylens"),
)
"""Files and folders that a node installs or that its processes read code, pages and the bundled model from."""
_COMPILED = (".pyc", ".so")
_MARK = "started"
"""Name of the file with the hash of the node's last start."""
_LOOK_SECONDS = 2.0
_NUM_LOOKS = 2
"""Ray has ended, and is not just restarting, after this many looks in a row without a raylet."""


def start_node(arguments: Sequence[str]) -> int:
    """Runs `ray start` with the arguments and returns its exit status. Does nothing if Ray already runs here with the
    same arguments and code; stops a different Ray first."""
    keep_ray_token_private(Path.home(), make=False)
    folder = node_folder()
    mark, kind = folder / _MARK, kind_of_start(arguments, Path(__file__).parents[3])
    if _ray_runs() and mark.is_file() and mark.read_text() == kind:
        print("Ray runs on this node already, as it is asked to")
        return 0
    _ray(["stop"], os.environ)
    end_orphans(folder)
    for left_over in folder.iterdir():
        if not left_over.is_dir():
            left_over.unlink()
    if (warning := allow_open_files()) is not None:
        print(warning)
    environment = node_environment(folder, is_head="--head" in arguments) | os.environ
    status = _ray(["start", *arguments], environment)
    if status == 0:
        mark.write_text(kind)
        _stay_beside_ray(folder)
    return status


def node_folder() -> Path:
    """Returns this node's folder, and creates it if it is missing."""
    folder = Path.home() / ".raylens"
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


def node_environment(folder: Path, *, is_head: bool) -> dict[str, str]:
    """Returns Ray's environment on a node. Ray's processes use the token in `~/.ray/auth_token`, which must be the same
    on all nodes."""
    storage = head_storage(folder / "gcs") if is_head else {}
    if is_head:
        (folder / "gcs").mkdir(mode=0o700, exist_ok=True)
    return {
        **RAY_ENVIRONMENT,
        **haproxy_environment(folder),
        **storage,
        FOLDER_VARIABLE: str(folder),
        "RAY_AUTH_MODE": "token",
    }


def end_orphans(folder: Path) -> None:
    """Kills the HAProxy whose files are in the folder."""
    for pid, words in _processes():
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
        raise RuntimeError("there is no program `ray` here: run this in the environment that Raylens is installed in")
    return subprocess.run([program, *arguments], env=environment, check=False).returncode


def _ray_runs() -> bool:
    return any(Path(words[0]).name == "raylet" for _, words in _processes())


def kind_of_start(arguments: Sequence[str], root: Path) -> str:
    """Returns a hash of the arguments, the autoscaler's file and the code below `root`. Compiled files are left out,
    because they follow from the others."""
    digest = hashlib.sha256("\0".join(arguments).encode())
    named = [Path(one.partition("=")[2]).expanduser() for one in arguments if one.startswith("--autoscaling-config=")]
    for file in [*_code_files(root), *(one for one in named if one.is_file())]:
        content = file.read_bytes()
        digest.update(f"\0{file}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _code_files(root: Path) -> list[Path]:
    found = [file for name in _CODE for file in ((root / name).rglob("*") if (root / name).is_dir() else [root / name])]
    return sorted(file for file in found if file.is_file() and file.suffix not in _COMPILED)


def _stay_beside_ray(folder: Path) -> None:
    command = [sys.executable, "-P", "-m", "raylens.deployments.launch.node", str(folder)]
    nowhere = subprocess.DEVNULL
    subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Yields this user's processes, each with its command line."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if entry.stat().st_uid == os.geteuid() and words[0]:
                yield int(entry.name), words


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
