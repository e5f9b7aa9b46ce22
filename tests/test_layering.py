"""One direction of imports. cpu_kernels lies at the bottom, and modeling on it. preprocess, encoder and llm are plain
libraries on modeling, and deployments is the only package above them. planning imports encoder, llm and the choice of a
replica, whose code it runs in virtual time; of deployments only the command line imports planning. In deployments each
room imports from those below it, see ROOMS. Only its room ray_internals uses Ray's private parts."""

import ast
import re
import sys
from collections.abc import Collection, Iterator
from functools import cache
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
    *(
        "routing",
        "wire",
        "stages",
        "item_store",
        "pipeline",
        "api",
        "operator",
        "batch",
        "endpoint",
        "cluster",
        "app",
        "launch",
    ),
)
"""The rooms of deployments from the bottom to the top. `app` is the files beside them, but for the GROUND."""
GROUND = (
    *(
        "config",
        "free_port",
        "metrics",
        "replica_start",
        "request_context",
        "server_log",
        "session_folder",
        "tracing",
    ),
    "ray_internals",
)
"""Files and folders of deployments that every room may import, and that import none."""
_RAY_INTERNALS = "deployments.ray_internals"
_DOCUMENTED_VARIABLES = ("RAY_AUTH_",)
"""How Ray's environment variables begin that its documentation names."""
_OF_PROMETHEUS_CLIENT = frozenset({"_sum", "_buckets", "_upper_bounds"})
_PARTS = ("Ray 2.60:", "Needed:", "Test:", "Way back:")
"""What the docstring of each file in ray_internals tells, in this order."""
_TORCHVISION = "modeling.torchvision_build"
_WITHOUT_WEIGHTS = (
    "modeling.checkpoint_files",
    "modeling.context_length",
    "modeling.families",
    "modeling.found_model",
    "modeling.model_configs",
    "modeling.pooling",
    "modeling.wemm_config",
    _TORCHVISION,
)
"""The files of modeling that preprocess may import: it needs what a model is called and set to, not its layers."""
_PLANNERS = ("launch.cli",)
"""The files of deployments that may import planning."""
_STAGES = "deployments.metrics.waterfall_stages"
"""The file of deployments that dashboards may import. It imports nothing."""
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
        elif package == "dashboards":
            if is_other_package and module != _STAGES:
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


def private_parts_of_ray(source: str, own_names: Collection[str] = ()) -> list[str]:
    """What the source uses of Ray's private parts, as far as it can be seen. `own_names`: the names with an underscore
    that Raylens has defined; no other object than Ray's has any others."""
    tree = ast.parse(source)
    of_ray = {alias.asname or alias.name for node in _imports_of_ray(tree) for alias in node.names}
    own = {*own_names, *underscore_names(source)}
    found = [f"{node.module}.{alias.name}" for node in _imports_of_ray(tree) for alias in node.names]
    found += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    found = [name for name in found if name.startswith("ray.") and _is_private_path(name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_underscore(node.attr) and node.attr not in own:
            found.append(node.attr)
        elif isinstance(node, ast.keyword) and _is_underscore(node.arg or "") and node.arg not in own:
            found.append(str(node.arg))
        elif isinstance(node, ast.ClassDef):
            found += [f"subclass of {base}" for base in map(ast.unparse, node.bases) if base in of_ray]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"RAY_\w+", node.value):
            found += [] if node.value.startswith(_DOCUMENTED_VARIABLES) else [node.value]
    return found


def underscore_names(source: str) -> set[str]:
    """The names with an underscore that the source defines: functions, classes, variables, and attributes of self."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return {name for name in names if _is_underscore(name)}


def _imports_of_ray(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ray":
            yield node


def _is_private_path(name: str) -> bool:
    return any(part == "generated" or _is_underscore(part) for part in name.split("."))


def _is_underscore(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


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


@pytest.mark.parametrize("path", sorted((ROOT / "deployments").rglob("*.py")), ids=module_name)
def test_private_parts_of_ray_are_used_in_their_room_only(path: Path) -> None:
    name = module_name(path)
    if name.startswith(_RAY_INTERNALS):
        others = [module for module in imported_modules(path.read_text()) if package_of(module) in PACKAGES]
        assert [module for module in others if not module.startswith(_RAY_INTERNALS)] == []
    else:
        known = own_underscore_names() | _OF_PROMETHEUS_CLIENT
        assert private_parts_of_ray(path.read_text(), known) == []


@cache
def own_underscore_names() -> frozenset[str]:
    files = (ROOT / "deployments").rglob("*.py")
    rooms = (path for path in files if not module_name(path).startswith(_RAY_INTERNALS))
    return frozenset(name for path in rooms for name in underscore_names(path.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        "from ray._private.worker import global_worker",
        "def f():\n    import ray.serve._private.router",
        "from ray.core.generated.common_pb2 import Address",
        "from ray.serve.context import _get_global_client",
        "import ray\nray._private.worker",
        "handle.options(_by_reference=False)",
        "response._replica_result_future.cancel()",
        "deployment._deployment_config = None",
        "from ray.serve.request_router import RequestRouter\nclass Own(RequestRouter):\n    pass",
        'os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"',
    ],
)
def test_a_private_part_of_ray_is_seen(source: str) -> None:
    assert len(private_parts_of_ray(source)) == 1


def test_what_is_public_of_ray_is_no_private_part() -> None:
    source = "from ray.serve.handle import DeploymentHandle\nclass Own:\n    def _f(self): self._g = self._f()"
    assert private_parts_of_ray(source) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deployments/ray_internals").glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_a_file_of_ray_internals_says_what_it_is_for_and_what_tests_it(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    starts = [docstring.find(f"\n{part}") for part in _PARTS]
    assert -1 not in starts
    assert starts == sorted(starts)
    test_part = docstring[starts[2] : starts[3]]
    files = [ROOT / name for name in re.findall(r"`(tests/\S+\.py)`", test_part)]
    assert files
    texts = "".join(file.read_text() for file in files)
    assert [name for name in re.findall(r"`(test_\w+)`", test_part) if f"def {name}(" not in texts] == []


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "libraries"),
    [("deployments.app", ("torch", "transformers")), ("planning.command", ("torch", "transformers", "ray"))],
)
def test_a_process_without_tensors_needs_no_torch(program: str, libraries: tuple[str, ...]) -> None:
    """The ingress passes references to tensors on, and a plan has none: what they import shows it."""
    import subprocess

    code = f"import sys, raylens.{program}; sys.exit(any(one in sys.modules for one in {libraries}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
