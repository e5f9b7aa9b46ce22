"""`ray up` with clusters/local.yaml on two hosts: at its end the application is ready, pictures cross between hosts,
one front door knows what the other knows, and `ray down` leaves nothing behind."""

import base64
import json
import re
import secrets
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from raylens.checkpoints import PICTURES
from tests.cluster.hosts import NETWORK, Host, missing, power_on, running_hosts
from tests.cluster.load import made_new
from tests.metric_values import LATENESS_SECONDS
from tests.otlp_collector import Received
from tests.traced import OF_GENERATE, OF_ITEM

ROOT = Path(__file__).parents[2]
PORT, COLLECTOR_PORT = 8600, 4317
REASON = missing()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.timeout(600),
]

INSTALL = f"""set -e
# Stands for `pip install -e .`, without a network: an environment of the host's own with the packages of this one.
{sys.executable} -m venv --without-pip ~/venv
site=$(echo ~/venv/lib/python3*/site-packages)
ls -d {sys.prefix}/lib/python3*/site-packages > $site/base.pth
echo ~/raylens > $site/raylens.pth
for program in ray serve raylens raylens-haproxy; do
  sed "1c #!$HOME/venv/bin/python" {sys.prefix}/bin/$program > ~/venv/bin/$program; chmod +x ~/venv/bin/$program
done
"""


class Cluster:
    """Two hosts as `ray up` makes a cluster of them, driven from a third."""

    def __init__(self, control: Host, head: Host, worker: Host) -> None:
        self.control, self.head, self.worker = control, head, worker
        self.doors = [f"http://{host.address}:{PORT}" for host in (head, worker)]
        self.first_up = ""

    def up(self, served: dict[str, Any]) -> str:
        """Makes the cluster, or brings it up to date, with `served` for serve.yaml; returns what `ray up` says."""
        (self.control.home / "raylens" / "serve.yaml").write_text(yaml.safe_dump(served))
        try:
            return self.control.run("ray up -y --no-config-cache cluster.yaml", timeout=400)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error

    def logs(self) -> str:
        """What to look at when something does not come about."""
        logs = "/tmp/ray/session_latest/logs"
        command = f"ray status; tail -n 30 {logs}/monitor.*; serve status; tail -n 60 {logs}/serve/*Ingress*"
        return self.head.run(command, check=False)

    def deploy(self, served: dict[str, Any], *options: str) -> str:
        """Deploys on the head, and returns what `raylens deploy` says."""
        (self.head.home / "raylens" / "serve.yaml").write_text(yaml.safe_dump(served))
        return self.head.run(f"cd raylens; raylens deploy {' '.join(options)}", timeout=600)

    def is_ready(self) -> bool:
        return all(self.get(door, "/health") == 200 for door in self.doors)

    def down(self) -> None:
        self.control.run("ray down -y cluster.yaml", timeout=200)

    def get(self, door: str, path: str) -> int:
        code = self.control.run(f"curl -s -o /dev/null -m 10 -w '%{{http_code}}' {door}{path}", check=False)
        return int(code[-3:] or 0)

    def metrics(self, door: str) -> dict[str, list[Sample]]:
        """Returns the samples of the page at a door by their names."""
        found: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(self.control.run(f"curl -s -m 20 {door}/metrics")):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
        return found

    def num_lost_nodes(self) -> float:
        return max(one.value for one in self.metrics(self.doors[0]).get("raylens_lost_nodes", []))

    def spans(self, trace_id: str) -> list[Received]:
        """What the collector has got of a trace."""
        *lines, _ = (self.control.home / "spans").read_text().split("\n")  # the last one may be half written
        return [span for line in lines if (span := Received(**json.loads(line))).trace_id == trace_id]

    def status_of_question(self, door: str) -> int:
        """The status of the answer to a short text, which is to come within half a minute."""
        body = {"model": "shapes", "prompt": "Hello", "max_tokens": 1}
        (self.control.home / "text.json").write_text(json.dumps(body))
        send = f"curl -s -o /dev/null -m 30 -w '%{{http_code}}' {door}/v1/completions -d @text.json"
        return int(self.control.run(f"{send} -H 'Content-Type: application/json'", check=False)[-3:] or 0)

    def ask(self, door: str, picture: Path | bytes, question: str, *, traceparent: str = "") -> Any:
        """The answer to a question about a picture. `traceparent`: of the client's trace, if it has one."""
        content_of = picture.read_bytes() if isinstance(picture, Path) else picture
        url = "data:image/png;base64," + base64.b64encode(content_of).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        body = {
            "model": "shapes",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "stage_timings": True,
        }
        (self.control.home / "body.json").write_text(json.dumps(body))
        headers = "-H 'Content-Type: application/json'" + (f" -H 'traceparent: {traceparent}'" if traceparent else "")
        send = f"curl -s -m 60 {door}/v1/chat/completions {headers} -d @body.json"
        answer = json.loads(self.control.run(send))
        assert "choices" in answer, f"{answer}\n{self.logs()}"
        return answer


def until(holds: Callable[[], bool], seconds: float, complain: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, complain()
        time.sleep(1)


def cluster_file(head: Host, worker: Host) -> dict[str, Any]:
    """clusters/local.yaml with these two hosts for its machines, and without a network to install from."""
    text = (ROOT / "clusters" / "local.yaml").read_text()
    cluster: dict[str, Any] = yaml.safe_load(text.replace("192.0.2.11", worker.address))
    cluster["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address]}
    cluster["auth"] = {"ssh_user": "root", "ssh_private_key": "~/id"}
    cluster["file_mounts"] |= {"~/raylens": "~/raylens", "~/install.sh": "~/install.sh"}
    del cluster["rsync_filter"]  # the compiled kernels come along
    for_shells = [command for command in cluster["setup_commands"] if ".bashrc" in command]
    cluster["setup_commands"] = ["test -x ~/venv/bin/ray || bash ~/install.sh", *for_shells]
    for host, key in ((head, "head_start_ray_commands"), (worker, "worker_start_ray_commands")):
        # Ray finds out a host's address by a route to the Internet. CPUs: more than the two of this machine.
        own = f"--num-cpus=8 --object-store-memory=300000000 --node-ip-address={host.address}"
        cluster[key][0] = f"{cluster[key][0]} {own}"
    return cluster


INGRESSES = "pgrep -f '^ray::ServeReplica:raylens:Ingress'"
ON_HEAD, ON_WORKER = "cpu_node", "encode_node"
"""The resources that clusters/local.yaml gives to these two."""
CROSSING = {"preprocess": ON_WORKER, "encode": ON_HEAD, "generate": ON_WORKER}
GENERATE_ON_WORKER = dict.fromkeys(("ingress", "shared", "preprocess", "encode"), ON_HEAD) | {"generate": ON_WORKER}
WITHOUT_HEAD = dict.fromkeys(("ingress", "shared", "preprocess", "encode", "generate"), ON_WORKER)


def serve_file(placement: dict[str, str]) -> dict[str, Any]:
    """serve.yaml with each stage on the host that the placement says, and traces for the collector."""
    served: dict[str, Any] = yaml.safe_load((ROOT / "serve.yaml").read_text())
    served["http_options"]["port"] = PORT
    args = served["applications"][0]["args"]
    args["ingress"] |= {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.1}
    args["shared"] |= {"shards": 2, "num_cpus": 0.1}
    args["tracing"] = {"endpoint": f"http://{NETWORK}.1:{COLLECTOR_PORT}"}
    for stage, host in placement.items():
        args[stage]["resources"] = {host: 1}
    return served


@contextmanager
def collecting(host: Host) -> Iterator[None]:
    """Collects traces on a host while the block runs."""
    command = f"cd raylens; exec python -m tests.otlp_collector {host.address}:{COLLECTOR_PORT} > ~/spans"
    with subprocess.Popen(host.inside(command)) as collector:
        try:
            yield
        finally:
            collector.terminate()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not below /tmp or a home: each host has its own of these.
    folder = Path(tempfile.mkdtemp(prefix="raylens-hosts-", dir="/var/tmp"))
    try:
        with running_hosts(["h1", "h2"], folder) as (control, head, worker):
            for host in (control, head, worker):
                host.environment.append("RAY_AUTH_MODE=token")
            shutil.copy(folder / "id", control.home / "id")
            (control.home / ".ray").mkdir()
            (control.home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
            (control.home / ".ray" / "auth_token").chmod(0o644)  # as Ray makes it
            (control.home / "install.sh").write_text(INSTALL)
            ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis")
            shutil.copytree(ROOT, control.home / "raylens", ignore=ignored, symlinks=True)
            (control.home / "cluster.yaml").write_text(yaml.safe_dump(cluster_file(head, worker)))
            control.run("bash install.sh")
            made = Cluster(control, head, worker)
            with collecting(control):
                made.first_up = made.up(serve_file(CROSSING))
                yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_application_is_ready_when_ray_up_ends(cluster: Cluster) -> None:
    assert "every stage is ready after" in cluster.first_up
    assert "Encode: starting, 0 of 1 replicas" in cluster.first_up
    assert cluster.is_ready()


def test_the_status_is_had_by_the_command_that_the_files_name(cluster: Cluster) -> None:
    (command,) = re.findall(
        r"^#   ray exec clusters/local.yaml (.*)$", (ROOT / "clusters/local.yaml").read_text(), re.M
    )
    status = cluster.control.run(f"ray exec cluster.yaml {command}")
    assert "status: RUNNING" in status


def test_no_other_user_of_a_node_reads_the_token(cluster: Cluster) -> None:
    for host in (cluster.head, cluster.worker):
        assert stat.S_IMODE((host.home / ".ray" / "auth_token").stat().st_mode) == 0o600


def test_an_endpoint_that_the_other_host_cannot_reach_is_refused(cluster: Cluster) -> None:
    refused = cluster.head.run("cd raylens; raylens deploy; echo status $?", check=False)
    assert "http_options.host: 127.0.0.1 cannot be reached from the other nodes of this cluster, which has 2" in refused
    assert "status 2" in refused


def test_a_picture_crosses_between_the_hosts(cluster: Cluster) -> None:
    questions = json.loads((PICTURES / "questions.json").read_text())
    one_picture = [one for one in questions if len(one["pictures"]) == 1]
    for number, one in enumerate(one_picture):
        answer = cluster.ask(cluster.doors[number % 2], PICTURES / one["pictures"][0], one["question"])
        assert answer["choices"][0]["message"]["content"] == one["answer"]


def test_what_one_door_has_seen_the_other_knows(cluster: Cluster) -> None:
    for number, name in enumerate(("one", "two", "three", "four", "five")):
        first, second = cluster.doors[number % 2], cluster.doors[1 - number % 2]
        cluster.ask(first, PICTURES / f"{name}.png", "How many shapes are there?")
        found = cluster.ask(second, PICTURES / f"{name}.png", "How many shapes are there?")
        assert found["stage_timings"]["embedding_cache_hits"] == 1


def test_each_door_tells_the_metrics_of_both_hosts(cluster: Cluster) -> None:
    before = cluster.metrics(cluster.doors[0])
    for number, name in enumerate(("one", "two", "three")):
        cluster.ask(cluster.doors[number % 2], PICTURES / f"{name}.png", "Which colour has it?")
    time.sleep(LATENESS_SECONDS)
    pages = [cluster.metrics(door) for door in cluster.doors]
    for page in pages:
        replicas = {(one.labels["deployment"], one.labels["node"]) for one in page["raylens_build_info"]}
        head, worker = cluster.head.address, cluster.worker.address
        assert replicas >= {("Preprocess", worker), ("Encode", head), ("Generate", worker), ("Ingress", head)}
        assert total(page["raylens_mm_items_total"]) - total(before["raylens_mm_items_total"]) == 3
        passed, moved = page["raylens_object_store_transfer_bytes_total"], page["raylens_node_transfer_bytes_total"]
        assert total(moved, edge="preprocess_encode") == total(passed, edge="preprocess_encode") > 0
        assert total(moved, edge="encode_generate") > total(passed, edge="encode_generate") > 0  # some were asked twice
    exporter = f"curl -s -m 10 http://{cluster.worker.address}:8081/metrics"  # as Prometheus reads it
    assert "raylens_num_requests_running{" in cluster.control.run(exporter)


def test_a_request_is_one_trace_of_both_hosts(cluster: Cluster) -> None:
    trace_id, client_id = secrets.token_hex(16), secrets.token_hex(8)
    picture = made_new((PICTURES / "one.png").read_bytes(), "traced")
    question = "How many shapes are there?"
    answer = cluster.ask(cluster.doors[0], picture, question, traceparent=f"00-{trace_id}-{client_id}-01")
    wanted = {"item", "generate", *OF_ITEM, *OF_GENERATE}

    def has_come() -> bool:
        spans = cluster.spans(trace_id)
        return wanted <= {span.name for span in spans} and client_id in {span.parent_id for span in spans}

    until(has_come, 20, lambda: f"{cluster.spans(trace_id)}\n{cluster.logs()}")
    spans = {span.name: span for span in cluster.spans(trace_id)}
    (root,) = [span for span in spans.values() if span.parent_id == client_id]
    assert (root.name, root.place.partition("#")[0]) == ("POST /v1/chat/completions", "Ingress")
    for whole, parts in ((root, ("item", "generate")), (spans["item"], OF_ITEM), (spans["generate"], OF_GENERATE)):
        assert {spans[part].parent_id for part in parts} == {whole.span_id}, whole.name
    head, worker = cluster.head.address, cluster.worker.address
    sent = {name: (span.place.partition("#")[0], span.host) for name, span in spans.items()}
    assert {sent[name] for name in ("media_decode", "processor")} == {("Preprocess", worker)}
    assert {sent[name] for name in ("transfer_pixels", "encode")} == {("Encode", head)}
    assert {sent[name] for name in ("transfer_embeddings", "prefill", "decode")} == {("Generate", worker)}
    for stage, seconds in answer["stage_timings"]["seconds"].items():
        assert spans[stage].seconds == pytest.approx(seconds, abs=0.002), stage


def total(samples: list[Sample], **labels: str) -> float:
    return sum(one.value for one in samples if labels.items() <= one.labels.items())


@pytest.mark.slow
def test_equal_pictures_at_both_doors_are_encoded_once_and_a_dead_ingress_takes_only_its_own_streams(
    cluster: Cluster,
) -> None:
    control = cluster.control
    cluster.ask(cluster.doors[0], PICTURES / "one.png", "How many shapes are there?")
    command = f"cd raylens; python -m tests.cluster.doors {' '.join(cluster.doors)} checkpoints/pictures"
    with subprocess.Popen(control.inside(command), stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdout is not None
        assert clients.stdout.readline() == "begun\n"
        holder = next(host for host in (cluster.worker, cluster.head) if host.run(f"{INGRESSES} || true").strip())
        holder.run(f"kill -9 $({INGRESSES} | head -1)")
        output, _ = clients.communicate(timeout=100)
    result = json.loads(output.splitlines()[-1])
    assert (result["wrong"], result["num_encoded"]) == ([], 1)
    assert set(result["ends"]) == {"whole", "cut"}, result["ends"]
    for door in cluster.doors:
        until(lambda door=door: cluster.get(door, "/health") == 200, 60, cluster.logs)  # type: ignore[misc]
        found = cluster.ask(door, PICTURES / "one.png", "How many shapes are there?")
        assert found["stage_timings"]["embedding_cache_hits"] == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_head_that_is_off_for_a_while_loses_no_request(cluster: Cluster) -> None:
    """All stages are on the other host; only what holds the cluster together is on the head."""
    cluster.deploy(serve_file(WITHOUT_HEAD), "--host", "0.0.0.0")
    until(cluster.is_ready, 60, cluster.logs)
    control, head = cluster.control, cluster.head
    num_lost = cluster.num_lost_nodes()
    command = f"cd raylens; python -m tests.cluster.load {cluster.doors[1]} 40 checkpoints/pictures"
    with subprocess.Popen(control.inside(command), stdout=subprocess.PIPE, text=True) as load:
        time.sleep(5)
        head.power_off()
        time.sleep(12)
        power_on(control, head)
        for start in cluster_file(head, cluster.worker)["head_start_ray_commands"]:
            head.run(f"export RAY_HEAD_IP={head.address}; {start}", timeout=100)
        output, _ = load.communicate(timeout=200)
    result = json.loads(output.splitlines()[-1])
    print(result["num_right"], "right answers")
    assert result["lost"] == []
    assert result["num_right"] >= 200
    until(cluster.is_ready, 100, cluster.logs)
    until(lambda: cluster.num_lost_nodes() == num_lost + 1, 30, cluster.logs)  # the head as it was before
    assert cluster.ask(cluster.doors[0], PICTURES / "one.png", "How many shapes are there?")["choices"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lost", ["raylet", "host"])
def test_who_asks_while_generate_s_node_is_lost_is_told_so_within_seconds(cluster: Cluster, lost: str) -> None:
    cluster.deploy(serve_file(GENERATE_ON_WORKER), "--host", "0.0.0.0")
    until(cluster.is_ready, 60, cluster.logs)
    control, worker = cluster.control, cluster.worker
    num_lost = cluster.num_lost_nodes()
    if lost == "raylet":
        worker.run("kill -9 $(ps -eo pid,comm | awk '$2 == \"raylet\" {print $1}')")
    else:
        worker.power_off()
    lost_at = time.monotonic()
    answers = []
    while time.monotonic() < lost_at + 40:
        started = time.monotonic()
        status = cluster.status_of_question(cluster.doors[0])
        answers.append((status, time.monotonic() - started))
        time.sleep(0.5)
    print(lost, [f"{status} after {seconds:.1f} s" for status, seconds in answers])
    # A replica without its raylet may give another answer before it ends.
    refusals = list(dropwhile(lambda answer: answer[0] == 200, answers))
    assert {status for status, _ in refusals} == {503}
    assert max(seconds for _, seconds in refusals) < 20
    assert statistics.median(seconds for _, seconds in refusals) < 3
    assert cluster.num_lost_nodes() == num_lost + 1
    if lost == "host":
        power_on(control, worker)
    for start in cluster_file(cluster.head, worker)["worker_start_ray_commands"]:
        worker.run(f"export RAY_HEAD_IP={cluster.head.address}; {start}", timeout=100)
    until(lambda: cluster.status_of_question(cluster.doors[0]) == 200, 150, cluster.logs)


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_second_up_brings_new_settings_and_restarts_nothing_else(cluster: Cluster) -> None:
    def raylets() -> list[str]:
        return [host.run("pgrep -f raylet/raylet").strip() for host in (cluster.head, cluster.worker)]

    before = raylets()
    assert all(before)
    served = serve_file(CROSSING)
    served["applications"][0]["args"]["encode"]["activation_bytes"] = 2**30
    said = cluster.up(served)
    assert "Encode: updating, 1 of 2 replicas" in said
    assert "every stage is ready after" in said
    assert raylets() == before
    assert cluster.is_ready()
    for door in cluster.doors:
        assert cluster.ask(door, PICTURES / "one.png", "How many shapes are there?")["choices"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_new_code_reaches_both_hosts_and_the_application_comes_back(cluster: Cluster) -> None:
    code = Path("raylens", "deployments", "app.py")
    with (cluster.control.home / code).open("a") as file:
        file.write("# changed\n")
    cluster.up(serve_file(CROSSING))
    for host in (cluster.head, cluster.worker):
        until(lambda home=host.home: "# changed" in (home / code).read_text(), 200, cluster.logs)  # type: ignore[misc]
    time.sleep(10)  # until Ray has been told to start anew
    until(cluster.is_ready, 200, cluster.logs)
    for door in cluster.doors:
        assert cluster.ask(door, PICTURES / "one.png", "How many shapes are there?")["choices"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_that_is_drained_moves_its_replicas_and_loses_no_request(cluster: Cluster) -> None:
    """By the command that kubernetes/rayservice.yaml has for a pod that is to end."""
    cluster.deploy(serve_file(dict.fromkeys(CROSSING, ON_WORKER)), "--host", "0.0.0.0")
    cluster.deploy(serve_file({}), "--host", "0.0.0.0")
    on_worker = "pgrep -fc '^ray::ServeReplica'"
    assert int(cluster.worker.run(on_worker)) > 0
    service = next(yaml.safe_load_all((ROOT / "kubernetes" / "rayservice.yaml").read_text()))
    (container,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    *_, hook = container["lifecycle"]["preStop"]["exec"]["command"]
    (cluster.worker.home / "hook.sh").write_text(hook)
    num_lost = cluster.num_lost_nodes()
    command = f"cd raylens; python -m tests.cluster.load {cluster.doors[0]} 60 checkpoints/pictures"
    with subprocess.Popen(cluster.control.inside(command), stdout=subprocess.PIPE, text=True) as load:
        time.sleep(5)
        cluster.worker.run("bash hook.sh", timeout=200)
        assert cluster.worker.run(on_worker, check=False).strip() == "0"
        output, _ = load.communicate(timeout=200)
    result = json.loads(output.splitlines()[-1])
    print(result["num_right"], "right answers")
    assert result["lost"] == []
    assert cluster.num_lost_nodes() == num_lost


@pytest.mark.slow
def test_down_leaves_no_process(cluster: Cluster) -> None:
    cluster.down()

    def left(host: Host) -> str:
        known = "bash|sshd|ps|grep|nsenter|env|COMMAND"
        return host.run(f"ps -eo args | grep -vE '^({known})|^-bash|^sshd:' || true").strip()

    def both() -> str:
        return left(cluster.head) + left(cluster.worker)

    # The worker ends when it has not heard of the head for a minute.
    until(lambda: not both(), 150, both)
