"""`ray up` on two hosts: pictures cross between them, what one front door knows the other knows, and `ray down` leaves
nothing behind."""

import base64
import json
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkpoints import PICTURES
from tests.cluster.hosts import Host, missing, power_on, running_hosts

ROOT = Path(__file__).parents[2]
PORT = 8600
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

    def up(self) -> None:
        self.control.run("ray up -y --no-config-cache cluster.yaml", timeout=200)
        until(lambda: "on_worker" in self.head.run("ray status", check=False), 100, self.logs)

    def logs(self) -> str:
        """What to look at when something does not come about."""
        logs = "/tmp/ray/session_latest/logs"
        command = f"ray status; tail -n 30 {logs}/monitor.*; serve status; tail -n 60 {logs}/serve/*Ingress*"
        return self.head.run(command, check=False)

    def deploy(self, placement: dict[str, str]) -> None:
        """`placement`: on which host each stage runs."""
        (self.head.home / "raylens" / "serve-two-hosts.yaml").write_text(yaml.safe_dump(serve_file(placement)))
        self.head.run("cd raylens; serve deploy serve-two-hosts.yaml", timeout=100)
        time.sleep(1)
        until(lambda: "status: RUNNING" in self.head.run("serve status -n raylens", check=False), 200, self.logs)
        until(lambda: all(self.get(door, "/health") == 200 for door in self.doors), 200, self.logs)

    def down(self) -> None:
        self.control.run("ray down -y cluster.yaml", timeout=200)

    def get(self, door: str, path: str) -> int:
        code = self.control.run(f"curl -s -o /dev/null -m 10 -w '%{{http_code}}' {door}{path}", check=False)
        return int(code[-3:] or 0)

    def status_of_question(self, door: str) -> int:
        """The status of the answer to a short text, which is to come within half a minute."""
        (self.control.home / "text.json").write_text(
            json.dumps({"model": "shapes", "prompt": "Hello", "max_tokens": 1})
        )
        send = f"curl -s -o /dev/null -m 30 -w '%{{http_code}}' {door}/v1/completions -d @text.json"
        return int(self.control.run(f"{send} -H 'Content-Type: application/json'", check=False)[-3:] or 0)

    def ask(self, door: str, picture: Path, question: str) -> Any:
        """The answer to a question about a picture."""
        url = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        body = {
            "model": "shapes",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "stage_timings": True,
        }
        (self.control.home / "body.json").write_text(json.dumps(body))
        send = f"curl -s -m 60 {door}/v1/chat/completions -H 'Content-Type: application/json' -d @body.json"
        answer = json.loads(self.control.run(send))
        assert "choices" in answer, f"{answer}\n{self.logs()}"
        return answer


def until(holds: Callable[[], bool], seconds: float, complain: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, complain()
        time.sleep(1)


def cluster_file(head: Host, worker: Host) -> dict[str, Any]:
    """cluster.yaml for these two hosts instead of a cloud's machines."""
    cluster: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    for name in ("head_node_type", "available_node_types", "head_setup_commands", "rsync_filter"):
        del cluster[name]
    cluster["max_workers"] = 1
    cluster["provider"] = {"type": "local", "head_ip": head.address, "worker_ips": [worker.address]}
    cluster["auth"] = {"ssh_user": "root", "ssh_private_key": "~/id"}
    cluster["file_mounts"] = {
        "~/raylens": "~/raylens",
        "~/.ray/auth_token": "~/.ray/auth_token",
        "~/install.sh": "~/install.sh",
    }
    cluster["setup_commands"] = [
        "test -x ~/venv/bin/ray || bash ~/install.sh",
        "grep -q 'venv/bin' ~/.bashrc || echo 'export PATH=\"$HOME/venv/bin:$PATH\"' >> ~/.bashrc",
    ]
    for host, key in ((head, "head_start_ray_commands"), (worker, "worker_start_ray_commands")):
        # The provider for machines that are there already works with the autoscaler's first version only.
        (start,) = cluster[key]
        role = "on_head" if host is head else "on_worker"
        options = f"--num-cpus=8 --object-store-memory=300000000 --node-ip-address={host.address}"
        resources = f"""--resources='{{"{role}":100}}'"""
        cluster[key] = [f"export RAY_enable_autoscaler_v2=0; {start} {options} {resources}"]
    return cluster


CROSSING = {"preprocess": "on_worker", "encode": "on_head", "generate": "on_worker"}
GENERATE_ON_WORKER = dict.fromkeys(("ingress", "shared", "preprocess", "encode"), "on_head") | {"generate": "on_worker"}
WITHOUT_HEAD = dict.fromkeys(("ingress", "shared", "preprocess", "encode", "generate"), "on_worker")


def serve_file(placement: dict[str, str]) -> dict[str, Any]:
    """serve.yaml with each stage on the host that the placement says."""
    served: dict[str, Any] = yaml.safe_load((ROOT / "serve.yaml").read_text())
    served["http_options"] = {"host": "0.0.0.0", "port": PORT}
    args = served["applications"][0]["args"]
    args["ingress"] |= {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.1}
    args["shared"] |= {"shards": 2, "num_cpus": 0.1}
    for stage, host in placement.items():
        args[stage]["resources"] = {host: 1}
    return served


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
            (control.home / ".ray" / "auth_token").chmod(0o600)
            (control.home / "install.sh").write_text(INSTALL)
            ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis")
            shutil.copytree(ROOT, control.home / "raylens", ignore=ignored, symlinks=True)
            (control.home / "cluster.yaml").write_text(yaml.safe_dump(cluster_file(head, worker)))
            control.run("bash install.sh")
            made = Cluster(control, head, worker)
            made.up()
            made.deploy(CROSSING)
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_head_that_is_off_for_a_while_loses_no_request(cluster: Cluster) -> None:
    """All stages are on the other host; only what holds the cluster together is on the head."""
    cluster.deploy(WITHOUT_HEAD)
    control, head = cluster.control, cluster.head
    shutil.copy(ROOT / "tests" / "cluster" / "load.py", control.home)
    command = f"python load.py {cluster.doors[1]} 40 raylens/checkpoints/pictures"
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
    until(lambda: cluster.get(cluster.doors[0], "/health") == 200, 100, cluster.logs)
    assert cluster.ask(cluster.doors[0], PICTURES / "one.png", "How many shapes are there?")["choices"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lost", ["raylet", "host"])
def test_who_asks_while_generate_s_node_is_lost_is_told_so_within_seconds(cluster: Cluster, lost: str) -> None:
    cluster.deploy(GENERATE_ON_WORKER)
    control, worker = cluster.control, cluster.worker
    if lost == "raylet":
        worker.run("kill -9 $(ps -eo pid,comm | awk '$2 == \"raylet\" {print $1}')")
    else:
        worker.power_off()
    lost_at = time.monotonic()
    refusals = []
    while time.monotonic() < lost_at + 40:
        started = time.monotonic()
        status = cluster.status_of_question(cluster.doors[0])
        refusals.append((status, time.monotonic() - started))
        time.sleep(0.5)
    print(lost, [f"{status} after {seconds:.1f} s" for status, seconds in refusals])
    assert {status for status, _ in refusals} == {503}
    assert max(seconds for _, seconds in refusals) < 20
    assert statistics.median(seconds for _, seconds in refusals) < 3
    if lost == "host":
        power_on(control, worker)
    for start in cluster_file(cluster.head, worker)["worker_start_ray_commands"]:
        worker.run(f"export RAY_HEAD_IP={cluster.head.address}; {start}", timeout=100)
    until(lambda: cluster.status_of_question(cluster.doors[0]) == 200, 150, cluster.logs)


@pytest.mark.timeout(400)
def test_a_second_up_brings_the_cluster_up_to_date(cluster: Cluster) -> None:
    cluster.up()
    until(lambda: all(cluster.get(door, "/health") == 200 for door in cluster.doors), 200, cluster.logs)
    for door in cluster.doors:
        assert cluster.ask(door, PICTURES / "one.png", "How many shapes are there?")["choices"]


def test_down_leaves_no_process(cluster: Cluster) -> None:
    cluster.down()

    def left(host: Host) -> str:
        known = "bash|sshd|ps|grep|nsenter|env|COMMAND"
        return host.run(f"ps -eo args | grep -vE '^({known})|^-bash|^sshd:' || true").strip()

    def both() -> str:
        return left(cluster.head) + left(cluster.worker)

    # The worker ends when it has not heard of the head for a minute.
    until(lambda: not both(), 150, both)
