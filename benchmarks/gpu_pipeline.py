"""The whole pipeline on one GPU: text streams beside pictures, with Encode and Generate sharing the card, and inline.

    python -m benchmarks.gpu_pipeline [llava | qwen2_5_vl] [--seconds 10] [--output FILE]

A checkpoint of random weights in bfloat16, made on the GPU: a vision tower of full size (CLIP-L of LLaVA 1.5, or that
of Qwen2.5-VL 7B), and a language half as wide as the 7B model's. It has a quarter of the layers, to be written and read
in seconds. It is served twice: with `encode.num_gpus: 0.3` beside `generate.num_gpus: 0.7`, and with `encode.placement:
inline`. Two clients stream short texts all the time. New pictures of 1024 x 1024 arrive at random times, at half and at
all of the rate that the first server sustains beside text. TTFT and ITL are those of `benchmarks.text_under_pictures`.
The last line is one JSON document.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.document import publish, save
from benchmarks.gpu_limits import chosen_device, device_parser, machine_of
from benchmarks.pictures import photograph
from benchmarks.random_checkpoint import LANGUAGE_LAYERS, make_large_checkpoint
from benchmarks.text_under_pictures import app_config, arrivals, capacity, run_load, shown
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import running_app

LOADS = (0.5, 1.0)
NUM_PREPROCESS = 4
CONCURRENCY, NUM_PICTURES = 16, 96
SETTINGS: dict[str, dict[str, Any]] = {
    "separate": {"encode": {"num_gpus": 0.3}, "generate": {"num_gpus": 0.7}},
    "inline": {"encode": {"placement": "inline"}, "generate": {"num_gpus": 1}},
}
"""The encoder's placement, and the stages' shares of the card."""
TINY_SECONDS = 3.0
TINY_SETTINGS: dict[str, dict[str, Any]] = {"separate": {}, "inline": {"encode": {"placement": "inline"}}}


def measure(folder: Path, seconds: float, output: Path | None, document: dict[str, Any], *, tiny: bool) -> None:
    """Adds each server's figures under each load to the document, and writes it after each load."""
    photo, rate = photograph(*((256, 256) if tiny else (1024, 1024))), None
    concurrency, count = (2, 4) if tiny else (CONCURRENCY, NUM_PICTURES)
    preprocess = dict.fromkeys(("min_replicas", "max_replicas"), 1 if tiny else NUM_PREPROCESS)
    for name, settings in (TINY_SETTINGS if tiny else SETTINGS).items():
        config = app_config(folder, preprocess=preprocess, **settings)
        with running_app(config, host="127.0.0.1", port=free_port()) as url:
            held = capacity(url, photo, concurrency=concurrency, num_pictures=count)  # also warms up
            document["measured"][f"{name}_capacity"] = {"pictures_per_second": round(held, 2)}
            rate = held if rate is None else rate
            for load in LOADS[-1:] if tiny else LOADS:
                figures = run_load(url, photo, arrivals(load * rate, seconds, seed=0), seconds).figures()
                document["measured"][f"{name}_load_{load}"] = {key: round(value, 2) for key, value in figures.items()}
                print(f"{name}, load {load}: {shown(figures)}", flush=True)
                save(document, output)


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("model", nargs="?", choices=LANGUAGE_LAYERS, default="llava", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each load (default: %(default)s)")
    options = parser.parse_args()
    device = chosen_device(parser, options)
    machine = machine_of(device, layers=LANGUAGE_LAYERS[options.model])
    document: dict[str, Any] = {"measured": {}, "machine": machine}
    with tempfile.TemporaryDirectory() as folder:
        make_large_checkpoint(options.model, Path(folder), device, tiny=options.tiny)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the servers measure free memory
        seconds = min(options.seconds, TINY_SECONDS) if options.tiny else options.seconds
        measure(Path(folder), seconds, options.output, document, tiny=options.tiny)
    publish(document, options.output)


if __name__ == "__main__":
    main()
