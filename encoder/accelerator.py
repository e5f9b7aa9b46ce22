"""Chooses the engine's GPU features: copies that overlap with computation, and CUDA graphs."""

import torch
from transformers import PreTrainedModel

from raylens.encoder.config import EncoderConfig
from raylens.encoder.models.family import VisionFamily
from raylens.encoder.overlapped_staging import CudaTransfers, OverlappedStaging
from raylens.encoder.staging import DirectStaging, Staging
from raylens.encoder.tower_graphs import TowerGraphs
from raylens.modeling.cuda_graphs import CudaCapture

_GRAPHS_SHARE = 1 / 16
"""The largest share of the GPU's memory that the CUDA graphs may take."""


def make_staging(config: EncoderConfig) -> Staging:
    """Returns overlapped staging if tower and projector are on one GPU, and direct staging otherwise.

    Between two devices the host waits within a batch. A plug-in runs on a thread of its own, without the streams of
    overlapped staging."""
    if is_on_one_gpu(config) and config.vision_plugin is None:
        return OverlappedStaging(CudaTransfers(torch.device(config.tower.device)))
    return DirectStaging(torch.device(config.tower.device))


def make_graphs(model: PreTrainedModel, family: VisionFamily, config: EncoderConfig) -> TowerGraphs | None:
    """Returns the tower's CUDA graphs, or None without a GPU, with parts on two devices, or for a family without
    `has_tiles`."""
    if not family.has_tiles or not is_on_one_gpu(config):
        return None
    device = torch.device(config.tower.device)
    max_bytes = int(torch.cuda.get_device_properties(device).total_memory * _GRAPHS_SHARE)
    return TowerGraphs(model.get_submodule(family.tower), CudaCapture(device), max_bytes=max_bytes)


def is_on_one_gpu(config: EncoderConfig) -> bool:
    """Returns whether the tower and the projector are on the same CUDA device."""
    tower, projector = torch.device(config.tower.device), torch.device(config.projector.device)
    # "cuda" without an index is the current device, by default 0.
    return tower.type == projector.type == "cuda" and (tower.index or 0) == (projector.index or 0)
