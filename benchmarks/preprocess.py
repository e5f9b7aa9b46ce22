"""The multimodal processor against direct calls of the Hugging Face processor, on one CPU thread.

    python -m benchmarks.preprocess [--rounds 9] [--backend torchvision] [--output FILE]

Both get the bytes of a JPEG and a text prompt, in turns, in one run. `cold` decodes, processes and expands; `repeat`
finds the picture by its hash and only expands. Sizes and patches are those of the released models; the tokenizers are
small. The last line is one JSON document. Checks are ratios of best times, because other programs use the machine, too.
"""

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.document import at_most, publish, this_machine
from raylens.modeling.families import load_family
from raylens.preprocess.hasher import content_hash, mm_hash
from raylens.preprocess.hf_processor import ImageBackend, load_processor
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import ItemInfo, ItemTensors, TextPrompt
from tests.preprocess.small_processors import prompt_placeholder, save_processor

RELEASED: dict[str, dict[str, Any]] = {
    "llava": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    "qwen2_vl": {"size": {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}},
    "fuyu": {"size": {"height": 1080, "width": 1920}, "patch_size": {"height": 30, "width": 30}},
}
SIZES = {"1024px": (1024, 1024), "4k": (3840, 2160)}
COLD, REPEAT, MEMORY = 1.0, 0.02, 1.0
"""Targets: times and bytes relative to the Hugging Face processor's."""


@dataclass(frozen=True)
class Contest:
    """One family's processors, Raylens' and Hugging Face's, and their common prompt."""

    ours: MultiModalProcessor
    theirs: Any
    prompt: str

    def direct(self, content: bytes) -> Any:
        image = Image.open(io.BytesIO(content)).convert("RGB")
        return self.theirs(text=self.prompt, images=[image], return_tensors="pt")

    def cold(self, content: bytes) -> tuple[ItemInfo, ItemTensors]:
        key = self.key(content)
        info, tensors = self.ours.items.process("image", content)
        self.ours.prompts.render(TextPrompt(self.prompt), [info], [key])
        return info, tensors

    def repeat(self, content: bytes, info: ItemInfo) -> None:
        self.ours.prompts.render(TextPrompt(self.prompt), [info], [self.key(content)])

    def key(self, content: bytes) -> str:
        fingerprint = self.ours.identity.fingerprint
        return mm_hash(content_hash(content), modality="image", processor_fingerprint=fingerprint)


def contest(model_type: str, folder: Path, backend: ImageBackend) -> Contest:
    save_processor(model_type, "metaspace", folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | RELEASED[model_type]))
    config = ProcessorConfig(str(folder), image_backend=backend, max_model_len=1_000_000)
    return Contest(
        MultiModalProcessor(config),
        load_processor(load_family("preprocess", model_type), str(folder), backend=backend),
        f"Look at this: {prompt_placeholder(model_type)} What is in the picture, and why?",
    )


def photograph(width: int, height: int) -> bytes:
    """Returns a JPEG with detail at all scales, like a camera's: about 0.3 bytes a pixel."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = (pixels + random.integers(-8, 9, pixels.shape)).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def compare(one: Contest, content: bytes, rounds: int) -> dict[str, float]:
    """Returns each variant's best seconds, measured in turns, and the bytes of both sides' tensors."""
    info, tensors = one.cold(content)
    outputs = one.direct(content)
    times: dict[str, list[float]] = {"direct": [], "cold": [], "repeat": []}
    for _ in range(rounds):
        times["direct"].append(seconds(lambda: one.direct(content)))
        times["cold"].append(seconds(lambda: one.cold(content)))
        times["repeat"] += [seconds(lambda: one.repeat(content, info)) for _ in range(5)]
    theirs = sum(value.nbytes for name, value in outputs.items() if name in tensors)
    best = {name: min(values) for name, values in times.items()}
    return best | {"ours_bytes": sum(tensor.nbytes for tensor in tensors.values()), "theirs_bytes": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="times that each way is measured")
    parser.add_argument("--backend", choices=["pil", "torchvision"], default="torchvision", help="image back end")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    checks: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    contents = {name: photograph(*size) for name, size in SIZES.items()}
    for model_type in RELEASED:
        with tempfile.TemporaryDirectory() as folder:
            one = contest(model_type, Path(folder), options.backend)
            for size, content in contents.items():
                found = compare(one, content, options.rounds)
                measured[f"{model_type} {size}"] = found
                ratios = {
                    "cold": (found["cold"] / found["direct"], COLD),
                    "repeat": (found["repeat"] / found["direct"], REPEAT),
                    "bytes": (found["ours_bytes"] / found["theirs_bytes"], MEMORY),
                }
                for name, (value, target) in ratios.items():
                    checks[f"{name} {model_type} {size}"] = at_most(round(value, 4), target)
                print(
                    f"{model_type:9} {size:7} direct {found['direct'] * 1e3:7.1f} ms, cold {ratios['cold'][0]:.2f}x,"
                    f" repeat {ratios['repeat'][0]:.4f}x,"
                    f" {found['ours_bytes'] / 2**20:.1f} MiB an item, {ratios['bytes'][0]:.2f}x"
                )
    document = {"checks": checks, "measured": measured, "backend": options.backend, "machine": this_machine()}
    publish(document, options.output)


if __name__ == "__main__":
    main()
