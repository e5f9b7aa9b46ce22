"""How long a small picture waits in the encoder engine on the CPU behind much other work, and how fast that work is.

    python -m benchmarks.encoder_waits [--rounds 3] [--threads 2] [--old TREE] [--output FILE]

The tower is Qwen2-VL's with 8 layers and random weights in float32, as in `benchmarks.encoder`. The other work comes
all at once: sixteen pictures of 308 pixels (of which two fill a batch), sixteen of 504 pixels (each more than a batch),
or one video of 128 frames of 252 pixels. It is encoded alone first, for its seconds. Then it is encoded again, and
meanwhile five pictures of 112 pixels come, one by one, spread over the first half of those seconds. Each waits from its
coming to its output. Waits are medians and the longest of all rounds, the seconds of the work are the best.

With `--old`, the engine of another checkout of this repository does the same, in turns with this one's. Each
measurement is a process of its own. Both checkouts need built kernels. The last line is one JSON document.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.document import publish, this_machine
from benchmarks.encoder import make_checkpoint, make_engine, qwen_items
from benchmarks.two_trees import add_old_option, trees_of
from raylens.cpu_kernels.library import kernel_library
from raylens.encoder.engine import EncoderEngine
from raylens.preprocess.schema import ItemTensors

NUM_PICTURES = 16
NUM_SMALL = 5
SMALL = (8, 8)
"""Patches high and wide, each of 14 pixels."""

Work = list[tuple[str, ItemTensors]]
"""The kind of each item, and its tensors."""


def pictures(side: int) -> Work:
    return [("image", item) for item in qwen_items([(side, side)] * NUM_PICTURES)]


def video(num_steps: int, side: int) -> Work:
    """A step of time is two frames."""
    patches = torch.randn(num_steps * side * side, 3 * 2 * 14 * 14)
    grid = torch.tensor([num_steps, side, side])
    return [("video", {"pixel_values_videos": patches, "video_grid_thw": grid})]


def encode(engine: EncoderEngine, work: Work, arrivals: list[float]) -> tuple[float, list[float]]:
    """Encodes the work, and a small picture that comes so many seconds after it for each of `arrivals`.

    Returns how long all of it took, and how long each small picture waited, in seconds."""
    coming: queue.SimpleQueue[str] = queue.SimpleQueue()
    started = time.perf_counter()
    sender = threading.Thread(target=_send, args=(coming, started, arrivals))
    sender.start()
    for number, (modality, item) in enumerate(work):
        engine.add_request(f"large {number}", modality, item)
    waits: dict[str, float] = {}
    (small,) = qwen_items([SMALL])
    while engine.has_unfinished() or len(waits) < len(arrivals):
        while not coming.empty():
            engine.add_request(coming.get(), "image", small)
        for output in engine.step():
            assert output.error is None
            if not output.request_id.startswith("large"):
                arrival = arrivals[int(output.request_id)]
                waits[output.request_id] = time.perf_counter() - started - arrival
    sender.join()
    return time.perf_counter() - started, list(waits.values())


def _send(coming: queue.SimpleQueue[str], started: float, arrivals: list[float]) -> None:
    for number, arrival in enumerate(arrivals):
        time.sleep(max(0.0, started + arrival - time.perf_counter()))
        coming.put(str(number))


def measure(checkpoint: str) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    if kernel_library() is None:
        raise SystemExit(f"the kernels in {Path.cwd()} are not built; `pip install -e .` there builds them")
    engine = make_engine(checkpoint, "packed")
    measured = {}
    for name, work in {
        "16 pictures of 308 pixels": pictures(22),
        "16 pictures of 504 pixels": pictures(36),
        "a video of 128 frames": video(64, 18),
    }.items():
        encode(engine, work[:2], [])  # to warm up
        seconds, _ = encode(engine, work, [])
        _, waits = encode(engine, work, [seconds / 2 * (number + 0.5) / NUM_SMALL for number in range(NUM_SMALL)])
        measured[name] = {"seconds": seconds, "waits": waits}
    return measured


def measure_in(tree: Path, checkpoint: str, threads: int) -> dict[str, dict[str, Any]]:
    """Measures the engine of the checkout `tree`, in a process of its own."""
    # -P: the folder of this file has a module that is called `encoder`, too.
    command = [sys.executable, "-P", __file__, "--measure", checkpoint, "--threads", str(threads)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, cwd=tree, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return measured


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    found = {}
    for name in rounds[0]:
        waits = [wait for one in rounds for wait in one[name]["waits"]]
        found[name] = {
            "median_wait_s": round(statistics.median(waits), 3),
            "longest_wait_s": round(max(waits), 3),
            "work_s": round(min(one[name]["seconds"] for one in rounds), 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each engine does everything")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch")
    add_old_option(parser)
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    parser.add_argument("--measure", metavar="CHECKPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    trees = trees_of(options)
    rounds: dict[str, list[dict[str, dict[str, Any]]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint("qwen2_vl", Path(folder))
        for _ in range(options.rounds):
            for name, tree in trees.items():
                rounds[name].append(measure_in(tree, checkpoint, options.threads))
                print(f"{name}: {summary(rounds[name][-1:])}", flush=True)
    measured = {name: summary(own) for name, own in rounds.items()}
    publish({"measured": measured, "machine": this_machine(threads=options.threads)}, options.output)


if __name__ == "__main__":
    main()
