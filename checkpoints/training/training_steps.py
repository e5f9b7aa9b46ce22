"""The losses of one training step.

Knows the model's parts (vision tower, projector, language model) but neither schedules nor files."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlavaForConditionalGeneration

from raylens.checkpoints.training.pointing import NO_PICTURE, Encode
from raylens.checkpoints.training.scenes import COLOURS, GRID, SHAPES, random_scene
from raylens.checkpoints.training.training_rows import (
    ALL_CELLS,
    IMAGE_SIZE,
    NOT_ASKED,
    PATCH_SIZE,
    Batch,
    cell_labels,
    photograph,
    to_pixels,
)

CELL_HEAD_SIZES = (len(COLOURS) + 1, len(SHAPES) + 1, GRID * GRID)  # an empty cell has colour 0 and kind 0
CellsBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # pixels, colour of each cell, kind of each cell


class Learner:
    """The model with two linear heads for hints, used in training only."""

    def __init__(self, model: LlavaForConditionalGeneration, encode: Encode, device: torch.device) -> None:
        self.model: Any = model.train()
        self.model.to(device)
        self.encode = encode
        self.device = device
        width = self.model.config.vision_config.hidden_size
        self.cell_head = nn.Linear(width, sum(CELL_HEAD_SIZES)).to(device)
        self.word_head = nn.Linear(self.model.config.text_config.hidden_size, ALL_CELLS).to(device)
        self.cell_of_patch = cells_of_patches().to(device)

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self.model.parameters()
        yield from self.cell_head.parameters()
        yield from self.word_head.parameters()

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16)

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns patch features in LLaVA's form (last layer, without the class token): [pictures, 36, width]."""
        outputs = self.model.model.vision_tower(pixels.to(self.device), output_hidden_states=True)
        features: torch.Tensor = outputs.hidden_states[-1][:, 1:]
        return features

    def name_cells(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns each patch's scores for colour, kind and place of its cell.

        Each patch learns all three, so that the language model needs to find a single patch only."""
        return self.cell_head(features).float().split(CELL_HEAD_SIZES, dim=-1)  # type: ignore[no-any-return]

    def read(self, batch: Batch, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns hidden states of the language model, half-way and at the end: twice [rows, length, width]."""
        model = self.model.model
        tokens = batch.tokens.to(self.device)
        embeds = model.language_model.get_input_embeddings()(tokens)
        is_image = (tokens == self.model.config.image_token_id)[..., None]
        if is_image.any():
            embeds = embeds.masked_scatter(is_image, model.multi_modal_projector(features).to(embeds.dtype))
        outputs = model.language_model(
            inputs_embeds=embeds,
            attention_mask=batch.attention.to(self.device),
            position_ids=batch.positions.to(self.device),
            use_cache=False,
            output_hidden_states=True,
        )
        half_way = self.model.config.text_config.num_hidden_layers // 2
        return outputs.hidden_states[half_way], outputs.last_hidden_state


def cells_of_patches() -> torch.Tensor:
    """Returns the cell of each patch, in the order of the vision tower: [36]."""
    edge = IMAGE_SIZE // PATCH_SIZE
    along = torch.arange(edge) * GRID // edge
    return (along[:, None] * GRID + along[None, :]).flatten()


def cells_batch(rng: random.Random, num_pictures: int) -> CellsBatch:
    """Returns pictures with up to nine shapes, more than in pictures with questions, so that each teaches more."""
    scenes = [random_scene(rng, GRID * GRID) for _ in range(num_pictures)]
    return to_pixels([photograph(scene, rng) for scene in scenes]), *cell_labels(scenes)


def cell_loss(learner: Learner, batch: CellsBatch) -> torch.Tensor:
    with learner.autocast():
        return _cell_loss(learner, learner.see(batch[0]), batch[1], batch[2])


def answer_loss(learner: Learner, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the losses over answer tokens, over cells of the pictures, and over the cells of words."""
    with learner.autocast():
        features = learner.see(batch.pixels)
        targets = batch.targets.to(learner.device)
        asked = targets != NOT_ASKED
        half_way, final = learner.read(batch, features)
        answers = F.cross_entropy(learner.model.lm_head(final[asked]).float(), targets[asked])
        cells = _cell_loss(learner, features, batch.cell_colours, batch.cell_kinds)
        return answers, cells, _word_loss(learner, half_way, batch)


def _cell_loss(
    learner: Learner, features: torch.Tensor, true_colours: torch.Tensor, true_kinds: torch.Tensor
) -> torch.Tensor:
    cells = learner.cell_of_patch
    colours = true_colours.to(learner.device)[:, cells]
    truths = (colours, true_kinds.to(learner.device)[:, cells], cells.expand_as(colours))
    losses = [
        F.cross_entropy(score.flatten(0, 1), truth.flatten())
        for score, truth in zip(learner.name_cells(features), truths, strict=True)
    ]
    return torch.stack(losses).sum()


def _word_loss(learner: Learner, half_way: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the loss of predicting a word's cells from its hidden state half-way through the language model."""
    row, position = batch.words.to(learner.device).unbind(1)
    meant = batch.word_cells.to(learner.device)
    there = meant != NO_PICTURE
    if not there.any():
        return half_way.new_zeros(())
    scores = learner.word_head(half_way[row, position]).float()
    return F.binary_cross_entropy_with_logits(scores[there], meant[there].float())
