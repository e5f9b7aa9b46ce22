"""Do running text streams notice that large pictures arrive? Every picture is a new one of 4K.

    python -m benchmarks.critical_path [--turns 8] [--seconds 2] [--output FILE]

Text streams run all the time; the phases take turns. In the phase `elsewhere` a process that has nothing to do with the
application works on 4K JPEGs, one after the other: what that costs the streams is the machine's doing, whose cores
share memory and clock, if not more. In the phase `preprocess` the same pictures go through the Preprocess stage
instead, as fast as it takes them; in the phase `requests` clients send them, by URL, in requests of their own, which
also have to be fetched, encoded and prefilled. One core is for the path of tokens, the other one for everything else,
so that what is measured is the path and not the lack of cores. Afterwards a profiler looks into the Generate replica
under the same load: nothing in it may work on media. The last line is one JSON document.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ray
import torch
from openai import OpenAI
from ray import serve

from benchmarks.document import publish, this_machine
from benchmarks.preprocess import photograph
from benchmarks.server_process import cpu_seconds, tree_of
from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import APP_NAME, free_port, running_app
from raylens.deployments.wire.stage_messages import ItemJob
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from tests.replicas import proxy_pids, replica_pids

NUM_STREAMS, NUM_SENDERS = 4, 2
PHASES = ["text", "elsewhere", "preprocess", "requests"]
MEDIA_MODULES = ("preprocess/", "PIL/", "torchvision/", "image_processing", "processing_utils")
TARGETS = {
    "itl p50, pictures in preprocess over elsewhere": 1.1,
    "generate's CPU ms a token, pictures in preprocess over elsewhere": 1.1,
    "generate's profile samples in media code": 0.0,
}


@dataclass
class Load:
    """Text streams, and pictures while `sends_pictures`; gaps between tokens in seconds by phase."""

    url: str
    picture_url: str
    phase: str = "warm-up"
    is_over: bool = False
    gaps: dict[str, list[float]] = field(default_factory=dict)
    num_pictures: Counter[str] = field(default_factory=Counter)

    def stream_forever(self) -> None:
        client = OpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=300)
        while not self.is_over:
            self._stream(client)

    def _stream(self, client: OpenAI) -> None:
        chunks: Any = client.chat.completions.create(
            model="shapes",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            max_tokens=1500,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        last: float | None = None
        for chunk in chunks:
            if self.is_over:
                return
            if not chunk.choices or not getattr(chunk.choices[0], "token_ids", None):
                continue
            now = time.perf_counter()
            if last is not None:
                gaps = self.gaps.setdefault(self.phase, [])
                gaps.append((now - last) / len(chunk.choices[0].token_ids))
            last = now

    def send_forever(self) -> None:
        client = OpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=300)
        while not self.is_over:
            if self.phase != "requests":
                time.sleep(0.05)
                continue
            part = {"type": "image_url", "image_url": {"url": f"{self.picture_url}/{time.perf_counter_ns()}"}}
            message: Any = {"role": "user", "content": [part]}
            client.chat.completions.create(model="shapes", messages=[message], max_tokens=1)
            self.num_pictures[self.phase] += 1


@contextmanager
def pictures_served() -> Iterator[str]:
    """A media host whose every path is another 4K JPEG: the same pixels, another comment at the end."""
    content = photograph(3840, 2160)
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = content + str(next(numbers)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "image/jpeg")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def work_elsewhere(core: int, may_work: str) -> None:
    """What the Preprocess stage does, without the stage, while the file `may_work` is there."""
    os.sched_setaffinity(0, {core})
    content = photograph(3840, 2160)
    torch.set_num_threads(1)
    items = MultiModalProcessor(ProcessorConfig(str(BUNDLED_MODEL))).items
    while True:
        if os.path.exists(may_work):
            items.process("image", content)
        else:
            time.sleep(0.01)


def keep_preprocess_busy(core: int, may_work: str) -> Any:
    """A process of the cluster that sends 4K JPEGs to Preprocess while the file is there; returns its reference."""

    def send_forever(content: bytes) -> None:
        os.sched_setaffinity(0, {core})
        handle = serve.get_deployment_handle("Preprocess", APP_NAME).options(stream=True)
        for number in itertools.count():
            while not os.path.exists(may_work):
                time.sleep(0.01)
            job = ItemJob("image", content + str(number).encode(), 3840 * 2160, 1, {})
            for _ in handle.process_item.remote(job):
                pass

    return ray.remote(num_cpus=0)(send_forever).remote(photograph(3840, 2160))


def share_out_cores() -> None:
    """Core 0 for the path of tokens: Generate, ingress, proxy and the clients. Core 1 for everything else."""
    on_path = {os.getpid(), *replica_pids("Generate"), *replica_pids("Ingress"), *proxy_pids()}
    for pid in tree_of(os.getpid()):
        pin(pid, 0 if pid in on_path else 1)


def pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def profile(pid: int, duration: float, file: str) -> None:
    """Samples all threads of a process 100 times a second while they run."""
    spy = Path(sys.executable).parent / "py-spy"
    command = [str(spy), "record", "--pid", str(pid), "--duration", str(int(duration)), "--format", "raw", "-o", file]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def read_profile(file: str) -> tuple[int, int, Counter[str]]:
    """Samples in all, those with a frame in media code, and how many were in which module at the bottom."""
    total = in_media = 0
    where: Counter[str] = Counter()
    for line in Path(file).read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        total += int(count)
        in_media += int(count) * any(module in stack for module in MEDIA_MODULES)
        where[stack.split(";")[-1].rpartition(":")[0]] += int(count)
    return total, in_media, where


def run_phases(load: Load, generate: int, files: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """All phases in turns, again and again, so that what else the machine does meets them alike; then, under the same
    load, the profile: a profiler halts its subject for every sample, longer where it has to wait for a core itself."""
    used = dict.fromkeys(PHASES, 0.0)
    for phase in PHASES * options.turns:
        with under_way(load, phase, files):
            started = cpu_seconds(generate)
            time.sleep(options.seconds)
            used[phase] += cpu_seconds(generate) - started
    phases = {phase: summary(load, phase, used[phase]) for phase in PHASES}
    total, in_media, where = 0, 0, Counter[str]()
    for phase in ("preprocess", "requests"):
        with under_way(load, phase, files), tempfile.NamedTemporaryFile(suffix=".txt") as file:
            profile(generate, options.turns * options.seconds, file.name)
            samples = read_profile(file.name)
        total, in_media, where = total + samples[0], in_media + samples[1], where + samples[2]
    top = dict(where.most_common(12))
    return {"phases": phases, "profile": {"samples": total, "in_media_code": in_media, "top": top}}


@contextmanager
def under_way(load: Load, phase: str, files: dict[str, Path]) -> Iterator[None]:
    if phase in files:
        files[phase].touch()
    time.sleep(0.5)  # until it is
    load.phase = phase
    yield
    load.phase = "between"
    if phase in files:
        files[phase].unlink()


def summary(load: Load, phase: str, cpu: float) -> dict[str, float]:
    gaps = load.gaps[phase]
    return {
        "itl_ms_p50": statistics.median(gaps) * 1e3,
        "itl_ms_p95": statistics.quantiles(gaps, n=20)[18] * 1e3,
        "tokens": len(gaps),
        "pictures": load.num_pictures[phase],
        "generate_cpu_ms_per_token": cpu / len(gaps) * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2, help="seconds of each turn (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="turns of each phase (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the JSON document there")
    options = parser.parse_args()
    settings = {
        "model": str(BUNDLED_MODEL),
        "media": {"fetch": {"allow_private_addresses": True}},
        "preprocess": {"max_replicas": 1},
    }
    config = AppConfig.model_validate(settings)
    with pictures_served() as picture_url, running_app(config, host="127.0.0.1", port=free_port()) as url:
        (generate,) = replica_pids("Generate")
        share_out_cores()
        load = Load(url, picture_url)
        targets = [load.stream_forever] * NUM_STREAMS + [load.send_forever] * NUM_SENDERS
        threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in threads:
            thread.start()
        with tempfile.TemporaryDirectory() as folder:
            files = {phase: Path(folder) / phase for phase in ("elsewhere", "preprocess")}
            arguments = (1, str(files["elsewhere"]))
            other = multiprocessing.get_context("spawn").Process(target=work_elsewhere, args=arguments, daemon=True)
            other.start()
            sender = keep_preprocess_busy(1, str(files["preprocess"]))
            time.sleep(15)  # until both have loaded what they need
            measured = run_phases(load, generate, files, options)
            other.kill()
            ray.cancel(sender, force=True)
        load.is_over = True
        for thread in threads:
            thread.join(60)
    before, during = measured["phases"]["elsewhere"], measured["phases"]["preprocess"]
    ratios = [during[name] / before[name] for name in ("itl_ms_p50", "generate_cpu_ms_per_token")]
    values = dict(zip(TARGETS, [*ratios, measured["profile"]["in_media_code"]], strict=True))
    checks = {
        name: {"value": round(value, 4), "target": TARGETS[name], "ok": value <= TARGETS[name]}
        for name, value in values.items()
    }
    publish({"checks": checks, **measured, "machine": this_machine(), "model": "shapes"}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
