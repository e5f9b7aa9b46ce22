"""What a server takes for a model as people publish it: time to load, memory, first prompts and idle processor time.

    python -m benchmarks.footprint [--checkpoint FOLDER] [--output FILE]

The model is a Qwen2.5-VL of random weights in bfloat16 (3.2 GB), which `--checkpoint` keeps for the next run. `raylens
serve` runs with its defaults. Memory is in GB, by stage: PSS after loading, and the highest RSS until then.
`read_seconds` is a plain read of the weights into memory of the same kind, the better of two. `ttft_ms` are ten prompts
of 100 tokens, each after a pause of the same length: on a virtual machine any work takes longer after one, even the sum
of 3 GB of numbers. `idle_cores` is the processor time of all processes in a minute without requests. The last line is
one JSON document.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.document import make_parser, publish, this_machine
from benchmarks.random_checkpoint import PUBLISHED, make_qwen_checkpoint
from benchmarks.server_process import cpu_seconds, memory_of, replica_of, running_serve, tree_of
from raylens.cpu_kernels.huge_pages import HugePages

MODEL = "random"
STAGES = ("Preprocess", "Encode", "Generate")
_IDLE_SECONDS = 60
_PAUSE_SECONDS = 4


@contextmanager
def checkpoint_in(folder: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        if not (place / "model.safetensors").exists():
            place.mkdir(exist_ok=True)
            make_qwen_checkpoint(place, scale=PUBLISHED)
        yield place


def read_seconds(file: Path) -> float:
    """Returns the time to read a file, which is in the page cache, into huge pages."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        memory = HugePages([file.stat().st_size]).take(file.stat().st_size)
        with file.open("rb", buffering=0) as opened:
            view, done = memory.numpy().data, 0
            while count := opened.readinto(view[done:]):
                done += count
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def ttft_ms(url: str, number: int) -> float:
    """Returns the time to the first token of a prompt of about 100 tokens, after a pause. No earlier prompt begins with
    the same tokens."""
    text = f"{number} " + "word " * 20
    body = {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0}
    time.sleep(_PAUSE_SECONDS)
    started = time.perf_counter()
    httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="folder of the checkpoint, made if it is not there")
    options = parser.parse_args()
    with checkpoint_in(options.checkpoint) as folder:
        file = folder / "model.safetensors"
        size, reading = file.stat().st_size, read_seconds(file)
        started = time.perf_counter()
        with running_serve({"model": str(folder), "served_model_name": MODEL}) as (url, server):
            start = time.perf_counter() - started
            memory = {stage: memory_of(replica_of(server, stage)) for stage in STAGES}
            first = [ttft_ms(url, number) for number in range(10)]
            warm = {stage: memory_of(replica_of(server, stage))["pss"] for stage in STAGES}
            pids = tree_of(server.pid)
            before = sum(map(cpu_seconds, pids))
            time.sleep(_IDLE_SECONDS)
            idle = (sum(map(cpu_seconds, pids)) - before) / _IDLE_SECONDS
    measured: dict[str, Any] = {
        "file_gb": round(size / 1e9, 2),
        "read_seconds": round(reading, 2),
        "start_seconds": round(start, 1),
        "memory": memory,
        "pss_after_prompts": warm,
        "ttft_ms": [round(one, 1) for one in first],
        "first_over_tenth": round(first[0] / statistics.median(first[5:]), 2),
        "idle_cores": round(idle, 3),
    }
    print(json.dumps(measured, indent=1))
    publish({"measured": measured, "machine": this_machine()}, options.output)


if __name__ == "__main__":
    main()
