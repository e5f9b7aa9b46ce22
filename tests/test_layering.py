"""One direction of imports. cpu_kernels lies at the bottom, and modeling on it. preprocess, encoder and llm are plain
libraries on modeling, and deployments is the only package above them. planning imports encoder, llm and the choice of a
replica, whose code it runs in virtual time; of deployments only the command line imports planning. In deployments each
room imports from those below it, see ROOMS."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "cpu_kernels",
    "preprocess",
    "modeling",
    "encoder",
    "llm",
    "planning",
    "deployments",
    "checkpoints",
)
"""The packages of raylens, each in a folder of its name beside raylens/."""
_PLUG_INS = "preprocess.vision_plugins"
"""Has layers as the encoder does, so it imports modeling."""
ROOMS = (
    *("routing", "wire", "stages", "item_store", "pipeline", "api", "operator", "endpoint", "cluster", "app", "launch"),
)
"""The rooms of deployments from the bottom to the top. `app` is the files beside them, but for the GROUND."""
GROUND = ("config", "loop_watchdog", "metrics", "replica_start", "request_context", "server_log", "tracing")
"""Files and two folders of deployments that every room may import, and that import none."""
_TORCHVISION = "modeling.torchvision_build"
_WITHOUT_WEIGHTS = (
    "modeling.context_length",
    "modeling.families",
    "modeling.model_configs",
    "modeling.wemm_config",
    _TORCHVISION,
)
"""The files of modeling that preprocess may import: it needs what a model is called and set to, not its layers."""
_PLANNERS = ("launch.cli",)
"""The files of deployments that may import planning."""
_PLANNED = ("deployments.routing.replica_choice",)
"""The files of deployments that planning may import, besides encoder and llm."""
SERVING_LIBRARIES = ("ray", "fastapi", "starlette", "uvicorn", "prometheus_client")


def imported_modules(source: str) -> Iterator[str]:
    """Every module that the source imports anywhere, also inside functions and under TYPE_CHECKING; those of raylens
    without that name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names = [f"raylens.{one.name}" for one in node.names] if node.module == "raylens" else [node.module]
        else:
            continue
        for name in names:
            assert name.partition(".")[0] not in PACKAGES, f"{name} is raylens.{name}"
            yield name.removeprefix("raylens.")


def package_of(module: str) -> str:
    return _PLUG_INS if module.startswith(_PLUG_INS) else module.partition(".")[0]


def violations(package: str, source: str) -> list[str]:
    """The imports in `source` that a module of `package` must not have."""
    found = []
    for module in imported_modules(source):
        top = package_of(module)
        is_other_package = top in (*PACKAGES, _PLUG_INS) and top != package
        if package == "planning":
            is_planned = top in ("encoder", "llm") or module in _PLANNED
            if top in SERVING_LIBRARIES or (is_other_package and not is_planned):
                found.append(module)
        elif package in ("cpu_kernels", "preprocess", "modeling", _PLUG_INS, "encoder", "llm"):
            is_halfs = package in ("encoder", "llm") and (module == "preprocess.schema" or top == "modeling")
            is_plug_in = (package in ("preprocess", "encoder") and top == _PLUG_INS) or (
                package == _PLUG_INS and top == "modeling"
            )
            is_kernel = package in ("modeling", "encoder", "llm") and top == "cpu_kernels"
            allowed = is_halfs or is_plug_in or is_kernel or module in _WITHOUT_WEIGHTS
            if top in SERVING_LIBRARIES or (is_other_package and not allowed):
                found.append(module)
        # The exception is not ours in meaning: it makes an installed library importable.
        elif is_other_package and (top == "deployments" or package != "deployments") and module != _TORCHVISION:
            found.append(module)
    return found


def room_of(module: str) -> str | None:
    """The room of a module of deployments, None for what belongs to the ground."""
    _, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if name in GROUND:
        return None
    return name if name in ROOMS else "app"


def room_violations(module: str, source: str) -> list[str]:
    """The imports in the `source` of a module of deployments that its room must not have."""
    room = room_of(module)
    found = []
    for imported in imported_modules(source):
        if imported.split(".")[0] == "planning" and module.partition(".")[2] not in _PLANNERS:
            found.append(imported)
        if not imported.startswith("deployments") or (target := room_of(imported)) is None:
            continue
        if room is None or ROOMS.index(target) > ROOMS.index(room):
            found.append(imported)
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def sources() -> list[Path]:
    return sorted(path for package in (*PACKAGES, "dashboards") for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_layers(path: Path) -> None:
    assert violations(package_of(module_name(path)), path.read_text()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "deployments").rglob("*.py")), ids=module_name)
def test_no_room_imports_from_one_above_it(path: Path) -> None:
    assert room_violations(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deployments.stages.pieces", "from raylens.deployments.item_store.client import Shards"),
        ("deployments.app", "from raylens.deployments.launch.cli import main"),
        ("deployments.pipeline.pipeline", "from raylens.deployments.api.wire import Usage"),
        ("deployments.api.chat", "from raylens.deployments.endpoint.gate import Gate"),
        ("deployments.endpoint.ingress", "from raylens.deployments.app import build_app"),
        ("deployments.endpoint.ingress", "from raylens.deployments import app"),
        ("deployments.config", "from raylens.deployments.stages.pieces import Piece"),
        ("deployments.app", "from raylens.planning.plan import make_plan"),
        ("deployments.stages.pieces", "import raylens.planning"),
    ],
)
def test_a_violation_of_the_rooms_is_seen(module: str, source: str) -> None:
    assert len(room_violations(module, source)) == 1


def test_every_folder_of_deployments_is_a_room() -> None:
    folders = {path.parent.name for path in (ROOT / "deployments").glob("*/*.py")}
    assert folders - set(GROUND) == set(ROOMS) - {"app"}


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("llm", "import ray"),
        ("llm", "from raylens.preprocess.processor import MultiModalProcessor"),
        ("encoder", "def f():\n    from raylens.llm.engine import LLMEngine"),
        ("preprocess", "from prometheus_client import Counter"),
        ("preprocess", "import raylens.deployments.app"),
        ("preprocess", "from raylens.modeling.half_model import without"),
        ("modeling", "from raylens.preprocess.schema import ItemTensors"),
        ("cpu_kernels", "from raylens.modeling.half_model import without"),
        ("preprocess", "from raylens.cpu_kernels.library import kernel_library"),
        ("checkpoints", "from raylens.deployments.launch.cli import main"),
        ("planning", "from raylens.deployments.config import AppConfig"),
        ("planning", "from raylens.deployments.routing.room_router import rank"),
        ("planning", "from raylens.modeling.families import FAMILIES"),
        ("planning", "import ray"),
        ("llm", "from raylens.planning.costs import Costs"),
        ("llm", "from raylens import deployments"),
    ],
)
def test_a_violation_is_seen(package: str, source: str) -> None:
    assert len(violations(package, source)) == 1


@pytest.mark.parametrize("source", ["import llm", "from deployments.app import build_app"])
def test_no_package_goes_by_a_name_without_raylens(source: str) -> None:
    with pytest.raises(AssertionError):
        list(imported_modules(source))


def test_every_python_file_at_the_top_belongs_to_a_known_package() -> None:
    tops = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/**/*.py")}
    assert tops - set(PACKAGES) <= {"raylens", "dashboards", "tests", "benchmarks", "build"}


def test_raylens_has_a_link_to_each_package() -> None:
    assert {path.name: path.resolve() for path in (ROOT / "raylens").iterdir() if path.is_symlink()} == {
        package: ROOT / package for package in PACKAGES
    }


@pytest.mark.parametrize(
    ("program", "libraries"),
    [("deployments.app", ("torch", "transformers")), ("planning.command", ("torch", "transformers", "ray"))],
)
def test_a_process_without_tensors_needs_no_torch(program: str, libraries: tuple[str, ...]) -> None:
    """The ingress passes references to tensors on, and a plan has none: what they import shows it."""
    import subprocess

    code = f"import sys, raylens.{program}; sys.exit(any(one in sys.modules for one in {libraries}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
