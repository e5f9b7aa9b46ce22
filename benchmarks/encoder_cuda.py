"""The encoder engine on a GPU against the GPU's limit, and against transformers' own towers.

    python -m benchmarks.encoder_cuda [--rounds 3] [--output FILE]

`clip` is LLaVA 1.5's tower and projector, CLIP-L of 336 pixels a side; `qwen2_vl` is Qwen2-VL's, with pictures of
several sizes. Both have random weights in bfloat16, made on the GPU. All pictures are in pageable memory from the
start, as Preprocess leaves them. A picture counts as done when its embeddings are back in host memory. `share_of_limit`
is the share of the rate of a large matrix product, counting the multiplications of linear layers and attention (of all
layers, as the tower runs them). transformers gets the same pictures with the same weights, one by one and in batches as
large as the engine's. The last line is one JSON document.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlavaConfig, PreTrainedConfig, PreTrainedModel, Qwen2VLConfig

from benchmarks.document import publish
from benchmarks.gpu_limits import (
    Limits,
    chosen_device,
    device_parser,
    dtype_of,
    measure_all,
    measure_limits,
    seconds_of,
)
from benchmarks.towers import encode_all, encode_in_batches
from raylens.encoder.config import EncoderConfig, PartConfig
from raylens.encoder.engine import EncoderEngine
from raylens.preprocess.schema import ItemTensors

TARGETS = {"clip": 0.55, "qwen2_vl": 0.55}
"""Minimum shares of the limit."""
MAX_BATCH_PATCHES = 16384
NUM_CLIP_PICTURES = 256
GRIDS = ((1, 46, 34), (1, 34, 46), (1, 32, 32), (1, 64, 48), (1, 24, 16), (1, 54, 96))
"""Patch grids of Qwen2-VL's pictures: frames, rows and columns."""
NUM_QWEN_PICTURES = 96
TINY_PICTURES, TINY_GRIDS = 3, ((1, 8, 4), (1, 4, 8))
TINY_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
TINY_QWEN = {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64}
TINY_TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Load:
    """A tower's configuration and pictures, the operations of one picture, and transformers' batch size."""

    config: PreTrainedConfig
    items: list[ItemTensors]
    operations: Callable[[PreTrainedModel, ItemTensors], int]
    batch_size: int


def clip_load(*, tiny: bool) -> Load:
    config = LlavaConfig(text_config=_small_text(LlavaConfig(), tiny=tiny))
    for name, value in TINY_CLIP.items() if tiny else ():
        setattr(config.vision_config, name, value)
    side, count = config.vision_config.image_size, TINY_PICTURES if tiny else NUM_CLIP_PICTURES
    items: list[ItemTensors] = [{"pixel_values": torch.randn(3, side, side)} for _ in range(count)]
    num_patches = (side // config.vision_config.patch_size) ** 2
    return Load(config, items, _clip_operations, MAX_BATCH_PATCHES // num_patches)


def qwen2_vl_load(*, tiny: bool) -> Load:
    config = Qwen2VLConfig(text_config=_small_text(Qwen2VLConfig(), tiny=tiny))
    for name, value in TINY_QWEN.items() if tiny else ():
        setattr(config.vision_config, name, value)
    size = 3 * config.vision_config.patch_size**2
    sizes, count = (TINY_GRIDS, TINY_PICTURES) if tiny else (GRIDS, NUM_QWEN_PICTURES)
    grids = [torch.tensor(sizes[index % len(sizes)]) for index in range(count)]
    items = [{"pixel_values": torch.randn(int(grid.prod()), size), "image_grid_thw": grid} for grid in grids]
    mean_patches = sum(len(item["pixel_values"]) for item in items) // len(items)
    return Load(config, items, _qwen2_vl_operations, max(1, MAX_BATCH_PATCHES // mean_patches))


def _small_text(config: PreTrainedConfig, *, tiny: bool) -> dict[str, Any]:
    """One layer: the language half is created and then dropped."""
    text = config.text_config.to_dict()
    small = {"num_hidden_layers": 1, "layer_types": None, "vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2}
    return {**text, **small, **(TINY_TEXT if tiny else {})}


def _num_weights(module: torch.nn.Module) -> int:
    """Returns the number of weights in matrix products."""
    layers = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
    return sum(own.weight.numel() for own in module.modules() if isinstance(own, layers))


def _attention_operations(num_layers: int, width: int, length: int) -> int:
    """Products of queries with keys, and of scores with values."""
    return 4 * num_layers * width * length**2


def _clip_operations(model: PreTrainedModel, item: ItemTensors) -> int:
    vision = model.config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    # The class token passes all layers but the first convolution and the projector.
    tower = model.get_submodule("model.vision_tower")
    projector = model.get_submodule("model.multi_modal_projector")
    weights = (num_patches + 1) * _num_weights(tower) + num_patches * _num_weights(projector)
    attention = _attention_operations(vision.num_hidden_layers, vision.hidden_size, num_patches + 1)
    return int(2 * weights + attention)


def _qwen2_vl_operations(model: PreTrainedModel, item: ItemTensors) -> int:
    vision = model.config.vision_config
    num_patches = len(item["pixel_values"])
    whole, merger = (_num_weights(model.get_submodule(path)) for path in ("model.visual", "model.visual.merger"))
    weights = num_patches * (whole - merger) + num_patches // vision.spatial_merge_size**2 * merger
    return int(2 * weights + _attention_operations(vision.depth, vision.embed_dim, num_patches))


def make_engine(config: PreTrainedConfig, device: torch.device) -> EncoderEngine:
    def random_half(model_class: type[PreTrainedModel], checkpoint: str, **options: Any) -> PreTrainedModel:
        with torch.device(device):
            return model_class._from_config(options["config"], dtype=options["dtype"]).eval()

    part = PartConfig(dtype_of(device), str(device))
    with (
        patch("raylens.encoder.loader.load_model_config", return_value=config),
        patch("raylens.encoder.loader.load_half", random_half),
    ):
        return EncoderEngine(EncoderConfig("", tower=part, projector=part, max_batch_patches=MAX_BATCH_PATCHES))


def make_theirs(engine: EncoderEngine, config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Returns transformers' own attention, without hooks, sharing the engine's weights."""
    with torch.device(device):
        theirs = engine._family.model_class._from_config(config, dtype=dtype_of(device), attn_implementation="sdpa")
    theirs.load_state_dict(engine._model.state_dict(), assign=True)
    return theirs.eval()


def measure_load(load: Load, device: torch.device, limits: Limits, rounds: int) -> dict[str, Any]:
    their_config = copy.deepcopy(load.config)
    engine = make_engine(load.config, device)
    theirs = make_theirs(engine, their_config, device)

    def in_batches(size: int) -> list[torch.Tensor]:
        return encode_in_batches(theirs, load.items, size)

    found, expected = encode_all(engine, load.items), in_batches(1)
    seconds = seconds_of(device, lambda: encode_all(engine, load.items), rounds)
    one_by_one = seconds_of(device, lambda: in_batches(1), rounds)
    together = seconds_of(device, lambda: in_batches(load.batch_size), rounds)
    operations = sum(load.operations(theirs, item) for item in load.items)
    return {
        "images_per_second": round(len(load.items) / seconds, 1),
        "tflops": round(operations / seconds / 1e12, 1),
        "share_of_limit": round(operations / limits.matmul_rate / seconds, 3),
        "one_by_one_images_per_second": round(len(load.items) / one_by_one, 1),
        "batched_images_per_second": round(len(load.items) / together, 1),
        "ratio_to_one_by_one": round(one_by_one / seconds, 2),
        "ratio_to_batched": round(together / seconds, 2),
        "largest_distance": round(max(map(distance, found, expected)), 4),
    }


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the relative difference to transformers' result."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def main() -> None:
    parser = device_parser(__doc__, rounds=3)
    options = parser.parse_args()
    device = chosen_device(parser, options)
    limits = measure_limits(device, tiny=options.tiny)
    torch.manual_seed(0)
    measurements = {
        name: partial(measure_load, make_load(tiny=options.tiny), device, limits, options.rounds)
        for name, make_load in {"clip": clip_load, "qwen2_vl": qwen2_vl_load}.items()
    }
    publish(measure_all(measurements, device, options.output, TARGETS, limits=limits.shown()), options.output)


if __name__ == "__main__":
    main()
