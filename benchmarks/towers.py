"""Embeddings of pictures, of the encoder engine and of transformers' own towers."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from raylens.encoder.engine import EncoderEngine
from raylens.preprocess.schema import ItemTensors


def encode_all(engine: EncoderEngine, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    for index, item in enumerate(items):
        engine.add_request(str(index), "image", item)
    found: dict[str, torch.Tensor] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                raise output.error
            assert output.embeddings is not None
            found[output.request_id] = output.embeddings
    return [found[str(index)] for index in range(len(items))]


@torch.inference_mode()
def encode_in_batches(model: PreTrainedModel, items: Sequence[ItemTensors], size: int) -> list[torch.Tensor]:
    """Returns the embeddings of transformers' model, in host memory. A batch has `size` pictures."""
    starts = range(0, len(items), size)
    return [own for start in starts for own in _encode_batch(model, items[start : start + size])]


def _encode_batch(model: PreTrainedModel, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
    pixels = [item["pixel_values"] for item in items]
    if "image_grid_thw" not in items[0]:
        batch = torch.stack(pixels).to(model.device, model.dtype)
        return [own.cpu() for own in model.get_image_features(pixel_values=batch).pooler_output]
    patches = torch.cat(pixels).to(model.device, model.dtype)
    # transformers' processor makes equal frames of each picture.
    num_frames = model.config.vision_config.temporal_patch_size
    frames = patches.view(len(patches), 3, 1, -1).expand(-1, -1, num_frames, -1).flatten(1)
    grids = torch.stack([item["image_grid_thw"] for item in items]).to(model.device)
    return [own.cpu() for own in model.get_image_features(pixel_values=frames, image_grid_thw=grids).pooler_output]
