"""The multimodal processor against direct calls of the Hugging Face processor, on one CPU thread.

    python -m benchmarks.preprocess [--rounds 9] [--output FILE]

Both get the bytes of a JPEG and a text prompt, in turns, in one run. `cold` decodes, processes and expands; `repeat`
finds the picture by its hash and only expands. Sizes and patches are those of the released models; the tokenizers are
small. The last line is one JSON document. Checks are ratios of best times, because other programs use the machine, too.
"""

import io
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.document import at_most, make_parser, publish, this_machine
from benchmarks.pictures import photograph
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
BACKEND: ImageBackend = "torchvision"
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


def contest(model_type: str, folder: Path) -> Contest:
    save_processor(model_type, "metaspace", folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | RELEASED[model_type]))
    config = ProcessorConfig(str(folder), image_backend=BACKEND, max_model_len=1_000_000)
    return Contest(
        MultiModalProcessor(config),
        load_processor(load_family("preprocess", model_type), str(folder), backend=BACKEND),
        f"Look at this: {prompt_placeholder(model_type)} What is in the picture, and why?",
    )


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
    options = make_parser(__doc__, rounds=9).parse_args()
    torch.set_num_threads(1)
    checks: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    contents = {name: photograph(*size) for name, size in SIZES.items()}
    for model_type in RELEASED:
        with tempfile.TemporaryDirectory() as folder:
            one = contest(model_type, Path(folder))
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
    publish({"checks": checks, "measured": measured, "machine": this_machine(backend=BACKEND)}, options.output)


if __name__ == "__main__":
    main()
