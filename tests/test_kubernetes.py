"""kubernetes/: manifests that Kubernetes and KubeRay accept, an application that finds its nodes, images with all it
needs. Nothing here runs in a cluster or builds an image."""

import copy
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

import raylens
from raylens.cpu_kernels.library import VARIABLE
from raylens.deployments.cluster.haproxy import PROGRAM, haproxy_environment
from raylens.deployments.config import AdmissionConfig, AppConfig
from raylens.deployments.endpoint.api_keys import ApiKeys
from raylens.deployments.item_store.kept_files import FOLDER_VARIABLE
from raylens.deployments.launch.cli import main
from raylens.deployments.launch.local_cluster import LOGGING
from raylens.deployments.ray_internals.environment import RAY_ENVIRONMENT
from tests.kuberay import RayService, read_ray_service
from tests.test_package import SOURCES

ROOT = Path(__file__).parents[1]
KUBERNETES = "1.37"
FOLDER = "/home/raylens/.raylens"
UNITS = {"Gi": 2**30, "Mi": 2**20}
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "kubernetes" / "rayservice.yaml").read_text()))
SERVICE = DOCUMENTS[0]
OTHERS = DOCUMENTS[1:]
DOCKERFILE = (ROOT / "kubernetes" / "Dockerfile").read_text()


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def groups(service: dict[str, Any] = SERVICE) -> list[dict[str, Any]]:
    """The head's group, and those of the workers."""
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def workers() -> list[dict[str, Any]]:
    return groups()[1:]


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def check(documents: list[dict[str, Any]]) -> RayService:
    """Raises if there is a field that is unknown, or of another type. KubeRay hands pod templates on to Kubernetes."""
    service, *others = documents
    for group in groups(service):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    for document in others:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    return read_ray_service(service)


def test_kubernetes_and_kuberay_know_every_field() -> None:
    kinds = [document["kind"] for document in DOCUMENTS]
    assert kinds == ["RayService", *["PodDisruptionBudget"] * 3, "NetworkPolicy"]
    service = check(DOCUMENTS)
    assert [group.group_name for group in service.spec.ray_cluster_config.worker_group_specs] == [
        "cpu",
        "encode",
        "generate",
    ]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((0, "spec", "serveConfig"), ""),
        ((0, "spec", "rayClusterConfig", "autoscalerOption"), {}),
        ((0, "spec", "rayClusterConfig", "rayVersion"), 2.6),
        ((0, "spec", "rayClusterConfig", "authOptions", "mode"), "tokens"),
        ((0, "spec", "rayClusterConfig", "workerGroupSpecs", 0, "minReplica"), 1),
        ((0, "spec", "rayClusterConfig", "workerGroupSpecs", 0, "rayStartParams", "num-cpus"), 1),
        ((0, "spec", "rayClusterConfig", "workerGroupSpecs", 1, "template", "spec", "volume"), []),
        ((0, "spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0, "enw"), []),
        ((1, "spec", "minAvailabel"), 1),
        ((4, "spec", "ingress", 1, "ports", 0, "port"), 80.5),
    ],
)
def test_a_misspelt_field_or_a_wrong_type_is_seen(path: tuple[int | str, ...], value: object) -> None:
    documents: Any = copy.deepcopy(DOCUMENTS)
    place = documents
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises((ValidationError, kubernetes_validate.ValidationError)):
        check(documents)


@pytest.fixture
def served() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
    return document


@pytest.fixture
def config(served: dict[str, Any]) -> AppConfig:
    (application,) = served["applications"]
    return AppConfig.model_validate(application["args"])


def test_ray_serve_and_raylens_accept_the_application(served: dict[str, Any], config: AppConfig) -> None:
    ServeDeploySchema.model_validate(served)
    (application,) = served["applications"]
    assert set(served) <= set(ServeDeploySchema.model_fields)
    assert set(application) <= set(ServeApplicationSchema.model_fields)
    own = yaml.safe_load((ROOT / "serve.yaml").read_text())["applications"][0]
    for field in ("name", "route_prefix", "import_path", "runtime_env", "logging_config"):
        assert application[field] == own[field]
    assert application["logging_config"] == LOGGING
    assert f"COPY checkpoints/shapes {config.model}" in DOCKERFILE


def test_every_stage_finds_a_group_with_room_for_it(config: AppConfig) -> None:
    stages: dict[str, tuple[Any, int]] = {
        "ingress": (config.ingress, 1),
        "shared": (config.shared, 1),
        "preprocess": (config.preprocess, 1),
        "encode": (config.encode, 1),
        "generate": (config.generate, config.generate.tensor_parallel_size),
    }
    for name, (stage, num_ranks) in stages.items():
        (kind,) = stage.resources
        (group,) = [one for one in workers() if kind in one["resources"]]
        limits = container(group)["resources"]["limits"]
        assert stage.num_cpus * num_ranks <= int(limits["cpu"]), name
        assert getattr(stage, "num_gpus", 0) * num_ranks == int(limits.get("nvidia.com/gpu", 0)), name
    assert groups()[0]["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in groups()[0]


def test_the_pods_of_the_ingress_are_as_many_at_least_as_its_replicas(config: AppConfig) -> None:
    assert workers()[0]["minReplicas"] >= config.ingress.min_replicas


def test_no_pod_and_no_old_cluster_ends_before_its_answers(config: AppConfig) -> None:
    for group in workers():
        pod = group["template"]["spec"]
        (deadline,) = re.findall(r"--deadline-remaining-seconds (\d+)", pre_stop(group))
        assert config.updates.drain_seconds < int(deadline) < pod["terminationGracePeriodSeconds"]
    assert config.updates.drain_seconds < SERVICE["spec"]["rayClusterDeletionDelaySeconds"]


def pre_stop(group: dict[str, Any]) -> str:
    """The command with which a worker moves its replicas to other nodes."""
    shell, option, command = container(group)["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("bash", "-c")
    return str(command)


@pytest.mark.parametrize("group", groups(), ids=["head", "cpu", "encode", "generate"])
def test_every_container_has_the_environment_of_raylens(group: dict[str, Any]) -> None:
    given = {one["name"]: one["value"] for one in container(group)["env"]}
    haproxy = haproxy_environment(Path(FOLDER)) | {"RAY_SERVE_HAPROXY_BINARY_PATH": f"/opt/raylens/bin/{PROGRAM}"}
    assert given == {**RAY_ENVIRONMENT, **haproxy, FOLDER_VARIABLE: FOLDER}
    assert "python -m venv /opt/raylens" in DOCKERFILE
    assert f"install --directory --mode=700 --owner=raylens --group=raylens {FOLDER}" in DOCKERFILE


@pytest.mark.parametrize("group", groups(), ids=["head", "cpu", "encode", "generate"])
def test_the_object_store_fits_into_memory_of_a_stated_size(group: dict[str, Any]) -> None:
    (mount,) = [one for one in container(group)["volumeMounts"] if one["mountPath"] == "/dev/shm"]
    (volume,) = [one for one in group["template"]["spec"]["volumes"] if one["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    size = num_bytes(volume["emptyDir"]["sizeLimit"])
    assert int(group["rayStartParams"]["object-store-memory"]) < size
    resources = container(group)["resources"]
    assert size <= num_bytes(resources["limits"]["memory"]) // 2
    assert resources["requests"] == resources["limits"], "nothing of it is lent to other pods"


@pytest.mark.parametrize("group", groups(), ids=["head", "cpu", "encode", "generate"])
def test_no_container_runs_as_root_or_becomes_root(group: dict[str, Any]) -> None:
    pod = group["template"]["spec"]["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert f"useradd --uid {pod['runAsUser']} " in DOCKERFILE
    assert container(group)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_budgets_and_the_policy_are_those_of_the_pods() -> None:
    labels = [group["template"]["metadata"]["labels"] for group in groups()]
    (common,) = {tuple(one.items()) for one in labels}
    *budgets, policy = OTHERS
    for group, budget in zip(workers(), budgets, strict=True):
        # KubeRay adds the label with the name of the group.
        assert budget["spec"]["selector"]["matchLabels"] == {**dict(common), "ray.io/group": group["groupName"]}
        # For pods of an operator's resource, Kubernetes takes no other form: it cannot ask for the number of replicas.
        assert type(budget["spec"]["minAvailable"]) is int
    assert policy["spec"]["podSelector"]["matchLabels"] == dict(common)


def test_only_the_endpoint_is_reached_from_elsewhere(served: dict[str, Any]) -> None:
    port = served["http_options"]["port"]
    assert served["http_options"]["host"] == "0.0.0.0"
    for group in groups():
        assert {"name": "serve", "containerPort": port} in container(group)["ports"]
    policy = OTHERS[-1]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    among_pods, public, operator = policy["ingress"]
    assert among_pods == {"from": [{"podSelector": policy["podSelector"]}]}
    assert public == {"ports": [{"protocol": "TCP", "port": port}]}
    (who,) = operator["from"]
    assert who["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}


def test_the_head_s_service_has_what_workers_and_the_operator_reach_it_by() -> None:
    """KubeRay makes it of the container's ports, by their names, and of these alone if there are any."""
    ports = {port["name"]: port["containerPort"] for port in container(groups()[0])["ports"]}
    metrics = {"metrics": 8080, "raylens-metrics": AppConfig().metrics.port}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "serve": 8000, **metrics}
    assert {"port", "dashboard-port"}.isdisjoint(groups()[0]["rayStartParams"])


def test_ray_asks_for_a_token_and_the_head_keeps_what_it_knows() -> None:
    cluster = read_ray_service(SERVICE).spec.ray_cluster_config
    assert cluster.auth_options is not None
    assert cluster.auth_options.mode == "token"
    text = (ROOT / "kubernetes" / "rayservice.yaml").read_text()
    assert f"kubectl create secret generic {cluster.auth_options.secret_name} --from-literal=auth_token=" in text
    assert cluster.gcs_fault_tolerance_options is not None


def documented(program: str) -> list[list[str]]:
    """The arguments of each command of a program that the head of the manifest shows."""
    head = (ROOT / "kubernetes" / "rayservice.yaml").read_text().partition("\napiVersion")[0]
    lines = [line.removeprefix("#").partition("   # ")[0].split() for line in head.splitlines()]
    return [words[1:] for words in lines if words[:1] == [program]]


def test_the_keys_of_clients_are_no_admins(
    config: AppConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = documented("raylens")
    assert [main(command) for command in commands] == [0, 0]
    (secret,) = [words for words in documented("kubectl") if "raylens-api-keys" in words]
    (file,) = [word.partition("=")[2] for word in secret if word.startswith("--from-file=")]
    keys = ApiKeys(file, {})
    callers = [keys.find(key) for key in capsys.readouterr().out.split()]
    assert [(one.name, one.is_admin) for one in callers if one] == [("alice", False), ("operator", True)]
    assert config.auth.keys_file == f"/etc/raylens/{file}"


def test_the_ingress_finds_the_keys_and_no_other_pod_has_them(config: AppConfig) -> None:
    (group,) = [one for one in workers() if set(one["resources"]) == set(config.ingress.resources)]
    (mount,) = [one for one in container(group)["volumeMounts"] if one["mountPath"] == "/etc/raylens"]
    (volume,) = [one for one in group["template"]["spec"]["volumes"] if one["name"] == mount["name"]]
    assert volume["secret"] == {"secretName": "raylens-api-keys", "defaultMode": 0o440}, "a pod without it never starts"
    assert "subPath" not in mount, "with it, the file would never change"
    for other in groups():
        assert "envFrom" not in container(other)
        if other is not group:
            assert not any("secret" in one for one in other["template"]["spec"]["volumes"])


def test_admission_has_room_for_all_replicas_of_generate(config: AppConfig) -> None:
    alone, times = AdmissionConfig(), config.generate.max_replicas
    for budget in ("total", "per_key"):
        scaled = {name: times * value for name, value in getattr(alone, budget).model_dump().items()}
        assert getattr(config.admission, budget).model_dump() == scaled
    assert config.admission.max_queued_requests == times * alone.max_queued_requests
    assert config.admission.max_queued_requests_per_key == times * alone.max_queued_requests_per_key


def test_versions_are_those_that_the_tests_run_with() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    (ray,) = re.findall(r"^ray==(\S+)$", constraints, re.MULTILINE)
    assert read_ray_service(SERVICE).spec.ray_cluster_config.ray_version == ray
    version = raylens.__version__
    images = [container(group)["image"] for group in groups()]
    assert images == [f"raylens:{version}-{kind}" for kind in ("cpu", "cpu", "cuda", "cuda")]
    for image in images:
        assert f"--target {image.rpartition('-')[2]} -t {image} ." in DOCKERFILE


def instructions() -> Iterator[tuple[str, str]]:
    """The Dockerfile's instructions, each with its arguments on one line."""
    lines = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, lines.splitlines()):
        name, _, arguments = line.partition(" ")
        yield name, arguments


def copied() -> set[str]:
    """What the images get from the repository."""
    words = [arguments.split() for name, arguments in instructions() if name == "COPY" and "--from" not in arguments]
    return {source for *sources, _ in words for source in sources}


def test_the_images_get_all_that_a_wheel_is_built_from_and_docker_is_shown_it() -> None:
    assert copied() == {*SOURCES, "constraints.txt", "checkpoints/shapes"}
    shown = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source.partition("/")[0] for source in copied()} == shown
    assert [source for source in copied() if not (ROOT / source).exists()] == []


def test_every_package_has_the_version_of_the_constraints() -> None:
    commands = [arguments for name, arguments in instructions() if name == "RUN" and "pip install" in arguments]
    assert len(commands) == 4
    for command in commands:
        assert "-c constraints.txt" in command or "--no-deps" in command
    (pattern,) = {
        found for command in commands for found in re.findall(r"\$\((grep -E .* constraints\.txt)\)", command)
    }
    found = subprocess.run(shlex.split(pattern), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.partition("==")[0] for line in found.splitlines()] == ["torch", "torchvision"]


def test_the_image_for_gpus_can_compile_what_triton_writes() -> None:
    """A kernel's launcher is a little C. Python's headers are in every image of Docker's `python`."""
    base, stage = "", ""
    for name, arguments in instructions():
        if name == "FROM":
            image, _, stage = arguments.partition(" AS ")
            base = image if stage == "runtime" else base
        elif name == "RUN" and stage == "cuda" and "apt-get" in arguments:
            assert {"gcc", "libc6-dev"} <= set(arguments.split())
            break
    else:
        pytest.fail("the image installs nothing")
    assert base.startswith("python:")


def test_the_last_user_of_every_image_is_not_root() -> None:
    users: dict[str, str] = {}
    stage = ""
    for name, arguments in instructions():
        if name == "FROM":
            base, _, stage = arguments.split()
            users[stage] = users.get(base, "0")
        elif name == "USER":
            users[stage] = arguments
    assert {image: users[image] for image in ("cpu", "cuda")} == {"cpu": "1000", "cuda": "1000"}


def test_the_python_of_the_images_is_one_that_raylens_takes() -> None:
    (python,) = re.findall(r"^ARG PYTHON=3\.(\d+)$", DOCKERFILE, re.MULTILINE)
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert int(python) >= int(required.removeprefix(">=3."))
    assert DOCKERFILE.count("FROM python:${PYTHON}-slim-") == DOCKERFILE.count("FROM python:") == 2


def test_what_the_probes_and_the_hook_call_is_installed() -> None:
    (installed,) = [arguments for name, arguments in instructions() if name == "RUN" and "procps" in arguments]
    assert "wget" in installed
    for group in workers():
        assert "pgrep" in pre_stop(group)


@pytest.mark.parametrize(("kernels", "status"), [("baseline", 0), ("off", 1)])
def test_an_image_without_kernels_is_not_built(kernels: str, status: int, tmp_path: Path) -> None:
    checks = [arguments for name, arguments in instructions() if name == "RUN" and "kernel_library" in arguments]
    assert len(checks) == 2
    for check_line in checks:
        before, _, command = check_line.partition(" && ")
        assert before == "cd /"
        program, *arguments = shlex.split(command)
        assert program == "python"
        environment = os.environ | {VARIABLE: kernels, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, check=False)
        assert done.returncode == status
