"""The encode stage against Hugging Face's vision towers on the CPU, and what handing embeddings over early is worth.

    python -m benchmarks.encoder [--rounds 3] [--threads 2] [--requests 6] [--output FILE]

First the engine alone, on two towers of 8 layers with random weights in float32: CLIP's, where all pictures have one
size, and Qwen2-VL's, with pictures of one size and of mixed ones (sides of 112 to 672 pixels). Hugging Face's own model
gets the same items image by image, and in batches of 8 in the order in which they came; all take turns in one run, and
the best of each counts. `plain` is the engine with transformers' own linear layers.

Then the whole pipeline over HTTP: the time to the first token of requests with 1, 4 and 8 new pictures of 448 pixels
behind a text, with embeddings handed over one by one as they come and, for comparison, all together when the last is
there; and of requests whose pictures have been seen. `embeddings_new_s` and `embeddings_seen_s` are the parts of it
before the language model begins, with all embeddings at hand. Medians. The last line is one JSON document.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from openai import OpenAI
from transformers import AutoConfig, PreTrainedModel

import raylens.deployments.app
import raylens.deployments.pipeline.pipeline
from benchmarks.document import at_least, publish, this_machine
from raylens.deployments.config import AppConfig
from raylens.deployments.endpoint.ingress import Ingress
from raylens.deployments.launch.local_cluster import deployed_app, free_port, local_ray
from raylens.deployments.pipeline.items_under_way import ItemsUnderWay
from raylens.encoder.config import EncoderConfig, LinearForm, PartConfig
from raylens.encoder.engine import EncoderEngine
from raylens.preprocess.schema import ItemTensors
from tests.pictures import user_message
from tests.preprocess.small_processors import save_processor
from tests.slow_encoder import large_picture
from tests.small_models import whole_class

NAIVE_BATCH = 8
VISION = {
    "llava": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 9, "num_attention_heads": 6}
    | {"image_size": 336, "patch_size": 14},
    "qwen2_vl": {"embed_dim": 384, "num_heads": 6, "depth": 8, "hidden_size": 512, "patch_size": 14},
    "qwen2_5_vl": {"hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "depth": 8, "out_hidden_size": 512}
    | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [3, 7]},
}
TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
}
TARGETS = {"clip, one size": 1.0, "qwen2_vl, one size": 1.0, "qwen2_vl, mixed sizes": 1.3}
"""Images a second over those of Hugging Face, the better of image by image and in batches; at least."""
NUM_PICTURES = (1, 4, 8)
SIDE = 448
SYSTEM_PROMPT = "You look at pictures and tell what they show, in a few plain words and without guessing. " * 8

Items = list[ItemTensors]


def make_checkpoint(model_type: str, folder: Path) -> str:
    save_processor(model_type, "byte_level", folder)
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    settings["vision_config"].update(VISION[model_type])
    settings["text_config"] |= TEXT
    settings["text_config"].pop("layer_types", None)
    file.write_text(json.dumps(settings))
    torch.manual_seed(0)
    whole_class(model_type)(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    processor = folder / "preprocessor_config.json"
    settings = json.loads(processor.read_text())
    if model_type.startswith("qwen"):
        settings["size"] = {"shortest_edge": 3136, "longest_edge": 2**20}
        processor.write_text(json.dumps(settings))
    return str(folder)


def clip_items(count: int) -> Items:
    return [{"pixel_values": torch.randn(3, 336, 336)} for _ in range(count)]


def qwen_items(sizes: list[tuple[int, int]]) -> Items:
    """Pictures of so many patches high and wide."""
    return [
        {"pixel_values": torch.randn(high * wide, 3 * 14 * 14), "image_grid_thw": torch.tensor([1, high, wide])}
        for high, wide in sizes
    ]


def mixed_sizes(count: int) -> list[tuple[int, int]]:
    """Sides of 8 to 48 patches, small ones as often as large ones on a logarithmic scale."""
    draw = random.Random(0)
    sides = [2 * round(4 * 6 ** draw.random()) for _ in range(2 * count)]
    return list(zip(sides[:count], sides[count:], strict=True))


@torch.inference_mode()
def features(model: PreTrainedModel, items: Items) -> None:
    pixels = [item["pixel_values"] for item in items]
    if "image_grid_thw" not in items[0]:
        model.get_image_features(pixel_values=torch.stack(pixels))
        return
    # What their processor hands to it: each picture is two equal frames.
    frames = [one.view(len(one), 3, 1, -1).expand(-1, -1, 2, -1).flatten(1) for one in pixels]
    grids = torch.stack([item["image_grid_thw"] for item in items])
    model.get_image_features(pixel_values=torch.cat(frames), image_grid_thw=grids)


def in_batches(model: PreTrainedModel, items: Items, size: int) -> None:
    for start in range(0, len(items), size):
        features(model, items[start : start + size])


def encode(engine: EncoderEngine, items: Items) -> None:
    for index, item in enumerate(items):
        engine.add_request(str(index), "image", item)
    while engine.has_unfinished():
        assert all(output.error is None for output in engine.step())


def compare(checkpoint: str, model: PreTrainedModel, items: Items, rounds: int) -> dict[str, float]:
    """Images a second of each way, by their best times, and ours over the better of theirs."""
    engines = {name: make_engine(checkpoint, name) for name in ("packed", "plain")}
    ways: dict[str, Callable[[], None]] = {
        "engine": lambda: encode(engines["packed"], items),
        "plain": lambda: encode(engines["plain"], items),
        "image by image": lambda: in_batches(model, items, 1),
        "batches of 8": lambda: in_batches(model, items, NAIVE_BATCH),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if number:  # the first is to warm up
                times[name].append(time.perf_counter() - started)
    rates = {name: round(len(items) / min(taken), 2) for name, taken in times.items()}
    best = max(rates["image by image"], rates["batches of 8"])
    return {**rates, "ratio": round(rates["engine"] / best, 3), "plain ratio": round(rates["plain"] / best, 3)}


def make_engine(checkpoint: str, linear: LinearForm) -> EncoderEngine:
    part = PartConfig(linear=linear)
    return EncoderEngine(EncoderConfig(checkpoint, tower=part, projector=part))


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


class _AllTogether(ItemsUnderWay):
    """Says that items have started only when the last of them is there."""

    async def started(self) -> None:
        await self._finished()


class IngressThatWaits(Ingress):
    """For comparison: the language model gets a request once all its embeddings are there."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        setattr(raylens.deployments.pipeline.pipeline, "ItemsUnderWay", _AllTogether)  # noqa: B010


@dataclass
class Pictures:
    """Ever new ones."""

    number: int = 0

    def take(self, count: int) -> list[bytes]:
        self.number += count
        return [large_picture(self.number - index, SIDE) for index in range(count)]


def ask(client: OpenAI, pictures: list[bytes]) -> tuple[float, float]:
    """Seconds to the first token, and of these the ones before the language model begins."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, user_message("What do they show?", *pictures)]
    options = {"ignore_eos": True, "stage_timings": True}
    started = time.perf_counter()
    answer: Any = client.chat.completions.create(
        model="small", messages=messages, max_tokens=1, temperature=0, extra_body=options
    )
    taken = time.perf_counter() - started
    seconds = answer.stage_timings["seconds"]
    return taken, taken - seconds["llm_queue"] - seconds["prefill"]


def measure_pipeline(checkpoint: str, num_requests: int) -> dict[str, dict[str, float]]:
    """Each way is deployed twice, in turns, and asked half of the requests each time."""
    # Without its prefix cache, so that only embeddings are found again.
    settings = {"model": checkpoint, "served_model_name": "small", "generate": {"engine": {"prefix_caching": False}}}
    config, port, pictures = AppConfig.model_validate(settings), free_port(), Pictures()
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with local_ray(host="127.0.0.1", port=port, num_cpus=8):
        for ingress, way in ((Ingress, "early"), (IngressThatWaits, "together")) * 2:
            served = deployed_app(config, host="127.0.0.1", port=port)
            with patch.object(raylens.deployments.app, "Ingress", ingress), served as url:
                client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
                ask(client, pictures.take(2))
                for count in NUM_PICTURES:
                    for _ in range(num_requests // 2):
                        new = pictures.take(count)
                        times.setdefault((way, count), []).append(ask(client, new))
                        times.setdefault((f"{way}, seen", count), []).append(ask(client, new))
    medians = {key: statistics.median(whole for whole, _ in taken) for key, taken in times.items()}
    before = {key: statistics.median(part for _, part in taken) for key, taken in times.items()}
    return {
        f"{count} new": {
            "early_s": round(medians["early", count], 3),
            "together_s": round(medians["together", count], 3),
            "gain": round(medians["together", count] / medians["early", count], 3),
            "seen_s": round(medians["early, seen", count], 3),
            "embeddings_new_s": round(before["together", count], 3),
            "embeddings_seen_s": round(before["together, seen", count], 3),
        }
        for count in NUM_PICTURES
    }


def checks_of(engine: dict[str, dict[str, float]], pipeline: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    checks: dict[str, tuple[float, float]] = {}
    checks |= {name: (engine[name]["ratio"], target) for name, target in TARGETS.items()}
    checks |= {f"gain of early hand-over, {name}": (one["gain"], 1.0) for name, one in pipeline.items()}
    checks |= {
        f"time to embeddings, {name} over seen": (round(one["embeddings_new_s"] / one["embeddings_seen_s"], 3), 1.0)
        for name, one in pipeline.items()
    }
    return {name: at_least(*one) for name, one in checks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each way encodes; the best time counts")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch, for the engine and Hugging Face alike")
    parser.add_argument("--requests", type=int, default=6, help="requests of each kind, over HTTP")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        engine = measure_engine(Path(folder), options.rounds)
        pipeline = measure_pipeline(str(Path(folder) / "qwen2_vl"), options.requests)
    for name, figures in pipeline.items():
        print(f"{name}: {figures}")
    checks = checks_of(engine, pipeline)
    document = {
        "checks": checks,
        "measured": {"engine": engine, "pipeline": pipeline},
        "machine": this_machine(threads=options.threads),
    }
    publish(document, options.output)


if __name__ == "__main__":
    main()
