"""Divides a large item into segments, so that other items can be encoded between them."""

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedConfig

from raylens.encoder.models.family import VisionModality
from raylens.encoder.schema import Segment
from raylens.preprocess.schema import ItemTensors


def divide(
    modality: VisionModality, config: PreTrainedConfig, item: ItemTensors, max_patches: int
) -> tuple[Segment, ...]:
    """Returns the item's segments in order, each as long as `max_patches` allows.

    An item is a single segment if it has at most `max_patches` or its family does not divide it. So is a single frame
    or tile of more than `max_patches`."""
    whole = Segment(item, modality.num_patches(config, item))
    division = modality.division
    if division is None or whole.num_patches <= max_patches or (num_units := division.num_units(item)) == 1:
        return (whole,)
    costs = [modality.num_patches(config, division.take(item, unit, unit + 1)) for unit in range(num_units)]
    return tuple(
        Segment(division.take(item, start, stop), sum(costs[start:stop]))
        for start, stop in _stretches(costs, max_patches)
    )


def join(modality: VisionModality, embeddings: list[torch.Tensor]) -> torch.Tensor:
    """Returns an item's embeddings, (num_embeds, embedding_size), from its segments' embeddings in order."""
    if len(embeddings) == 1:
        return embeddings[0]
    assert modality.division is not None, "only a divided item has several segments"
    return modality.division.join(embeddings)


def _stretches(costs: Sequence[int], max_cost: int) -> Iterator[tuple[int, int]]:
    """Yields start and end of each stretch of units: as long as `max_cost` allows, but at least one unit."""
    start, cost = 0, 0
    for unit, own in enumerate(costs):
        if unit > start and cost + own > max_cost:
            yield start, unit
            start, cost = unit, 0
        cost += own
    yield start, len(costs)
