"""The encoder engine against Hugging Face's vision towers on the CPU.

    python -m benchmarks.encoder [--rounds 3] [--threads 2] [--output FILE]

Three towers of 8 layers with random weights in float32: CLIP's, with pictures of one size, Qwen2-VL's, with pictures of
one size and of mixed sizes (sides of 112 to 672 pixels), and Qwen2.5-VL's, with mixed sizes. Hugging Face's own model
gets the same items one by one, and in batches of 8 in order of arrival. All variants take turns in one run; the best
time of each counts. `plain` is the engine with transformers' own linear layers. The last line is one JSON document.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from benchmarks.document import at_least, make_parser, publish, this_machine
from benchmarks.random_checkpoint import TEXT_CONFIG
from benchmarks.towers import encode_all, encode_in_batches
from raylens.encoder.config import EncoderConfig, PartConfig
from raylens.encoder.engine import EncoderEngine
from raylens.preprocess.schema import ItemTensors
from tests.preprocess.small_processors import save_processor
from tests.small_models import whole_class

NAIVE_BATCH = 8
VISION = {
    "llava": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 9, "num_attention_heads": 6}
    | {"image_size": 336, "patch_size": 14},
    "qwen2_vl": {"embed_dim": 384, "num_heads": 6, "depth": 8, "hidden_size": 512, "patch_size": 14},
    "qwen2_5_vl": {"hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "depth": 8, "out_hidden_size": 512}
    | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [3, 7]},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
TARGETS = {"clip, one size": 1.0, "qwen2_vl, one size": 1.0, "qwen2_vl, mixed sizes": 1.3}
"""Minimum ratio of images per second to Hugging Face's better variant."""

Items = list[ItemTensors]


def make_checkpoint(model_type: str, folder: Path) -> str:
    save_processor(model_type, "byte_level", folder)
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    settings["vision_config"].update(VISION[model_type])
    settings["text_config"] |= TEXT_CONFIG | {"rope_parameters": ROPE}
    settings["text_config"].pop("layer_types", None)
    file.write_text(json.dumps(settings))
    torch.manual_seed(0)
    whole_class(model_type)(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return str(folder)


def clip_items(count: int) -> Items:
    return [{"pixel_values": torch.randn(3, 336, 336)} for _ in range(count)]


def qwen_items(sizes: list[tuple[int, int]]) -> Items:
    """Pictures of the given heights and widths in patches."""
    return [
        {"pixel_values": torch.randn(high * wide, 3 * 14 * 14), "image_grid_thw": torch.tensor([1, high, wide])}
        for high, wide in sizes
    ]


def mixed_sizes(count: int) -> list[tuple[int, int]]:
    """Sides of 8 to 48 patches, uniform on a logarithmic scale."""
    draw = random.Random(0)
    sides = [2 * round(4 * 6 ** draw.random()) for _ in range(2 * count)]
    return list(zip(sides[:count], sides[count:], strict=True))


def compare(checkpoint: str, model: PreTrainedModel, items: Items, rounds: int) -> dict[str, float]:
    """Returns each variant's images per second by best times, and the engine's ratio to the better Hugging Face
    variant."""
    parts = {"packed": PartConfig(linear="packed"), "plain": PartConfig(linear="plain")}
    engines = {
        name: EncoderEngine(EncoderConfig(checkpoint, tower=part, projector=part)) for name, part in parts.items()
    }
    ways: dict[str, Callable[[], object]] = {
        "engine": lambda: encode_all(engines["packed"], items),
        "plain": lambda: encode_all(engines["plain"], items),
        "image by image": lambda: encode_in_batches(model, items, 1),
        "batches of 8": lambda: encode_in_batches(model, items, NAIVE_BATCH),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - started)
    rates = {name: round(len(items) / min(taken), 2) for name, taken in times.items()}
    best = max(rates["image by image"], rates["batches of 8"])
    return {**rates, "ratio": round(rates["engine"] / best, 3), "plain ratio": round(rates["plain"] / best, 3)}


def measure_engine(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    measured = {}
    for model_type, cases in {
        "llava": {"clip, one size": clip_items(24)},
        "qwen2_vl": {
            "qwen2_vl, one size": qwen_items([(24, 24)] * 24),
            "qwen2_vl, mixed sizes": qwen_items(mixed_sizes(48)),
        },
        "qwen2_5_vl": {"qwen2_5_vl, mixed sizes": qwen_items(mixed_sizes(48))},
    }.items():
        checkpoint = make_checkpoint(model_type, folder / model_type)
        model = whole_class(model_type).from_pretrained(checkpoint, dtype=torch.float32).eval()
        for name, items in cases.items():
            measured[name] = compare(checkpoint, model, items, rounds)
            print(f"{name}: {measured[name]}", flush=True)
    return measured


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch, for the engine and Hugging Face alike")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure_engine(Path(folder), options.rounds)
    checks = {name: at_least(measured[name]["ratio"], target) for name, target in TARGETS.items()}
    machine = this_machine(threads=options.threads)
    publish({"checks": checks, "measured": measured, "machine": machine}, options.output)


if __name__ == "__main__":
    main()
