"""Turns scenes and questions into the tensors of one training step.

A row holds one to three pictures (or none) and as many question-answer turns as fit into `ROW_TOKENS`. *Separate* turns
see only the pictures and themselves, at the positions of a first question. In a *conversation* each turn also sees the
earlier turns."""

import io
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from raylens.checkpoints.training.pointing import CELLS, MAX_PICTURES, Encode, Pointer
from raylens.checkpoints.training.questions import Question, QuestionDeck, draw_small_talk
from raylens.checkpoints.training.scenes import COLOURS, GRID, SHAPES, Scene, random_scene, random_scenes, render

BOS, EOS, PAD, IMAGE = "<s>", "</s>", "<pad>", "<image>"
IMAGE_SIZE, PATCH_SIZE = 96, 16
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2
PIXEL_MEAN = PIXEL_STD = 0.5
RESAMPLE = Image.Resampling.BICUBIC
ROW_TOKENS = 192
NOT_ASKED = -100
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a careful assistant that answers questions about pictures.",
)
ALL_CELLS = CELLS * MAX_PICTURES


@dataclass(slots=True)
class Row:
    """One sequence under construction. `targets[i]`: the token that position i must predict, if any."""

    conversation: bool
    tokens: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # 0 for the pictures before the first turn
    pointed: list[tuple[int, list[int]]] = field(default_factory=list)  # position of a word, the cells it means

    def append(self, tokens: tuple[int, ...], num_answer_tokens: int, turn: int, position: int) -> None:
        """Adds tokens. The last `num_answer_tokens` are training targets."""
        last = len(tokens) - 1
        asked = range(last - num_answer_tokens, last) if num_answer_tokens else range(0)
        self.targets += [tokens[i + 1] if i in asked else NOT_ASKED for i in range(len(tokens))]
        self.tokens += tokens
        self.positions += range(position, position + len(tokens))
        self.turns += [turn] * len(tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step. `attention`: True where position i of a row sees position j."""

    tokens: torch.Tensor  # [rows, length]
    targets: torch.Tensor  # [rows, length]
    positions: torch.Tensor  # [rows, length]
    attention: torch.Tensor  # [rows, 1, length, length]
    pixels: torch.Tensor  # [pictures, 3, height, width]
    cell_colours: torch.Tensor  # [pictures, 9], 0 for an empty cell
    cell_kinds: torch.Tensor  # [pictures, 9], 0 for an empty cell
    words: torch.Tensor  # [words, 2]: row and position of each colour or shape word of a question
    word_cells: torch.Tensor  # [words, 27]: 1 where it means that cell, 0 where not, -1 where there is no picture


def encoder_of(tokenizer: PreTrainedTokenizerFast) -> Encode:
    """Returns a function that encodes without BOS. It is cached, because questions repeat often."""

    @cache
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    return encode


def build_batch(
    rng: random.Random, encode: Encode, num_rows: int, weights: Mapping[str, float], several: float
) -> Batch:
    """Draws `num_rows` rows, half of them conversations. `weights`: how often each kind of question is asked, by
    default 1. `several`: the share of rows with two or three pictures. The same state of `rng` gives the same batch."""
    rows, scenes = [], []
    for _ in range(num_rows):
        of_row = random_scenes(rng, several)
        rows.append(build_row(rng, encode, of_row, weights, rng.random() < 0.5))
        scenes += of_row
    scenes = scenes or [random_scene(rng, 1)]
    return _to_tensors(rows, scenes, encode, [photograph(scene, rng) for scene in scenes])


def build_row(
    rng: random.Random, encode: Encode, scenes: list[Scene], weights: Mapping[str, float], conversation: bool
) -> Row:
    row = Row(conversation)
    system = f"{rng.choice(SYSTEM_MESSAGES)}\n" if rng.random() < 0.08 else ""
    prefix = BOS + system
    if scenes:
        prefix += "USER: " + (IMAGE * TOKENS_PER_IMAGE + "\n") * len(scenes)
    row.append(encode(prefix), 0, 0, 0)
    start = len(row.tokens)
    pointer = Pointer(encode)
    for turn, question in enumerate(_endless_questions(rng, scenes, weights), start=1):
        # The first question's "USER: " precedes its pictures, if it has any.
        head = "" if scenes and (turn == 1 or not conversation) else "USER: "
        asked = encode(f"{head}{question.text} ASSISTANT:")
        answer = encode(f" {question.answer}{EOS}")
        if len(row.tokens) + len(asked) + len(answer) > ROW_TOKENS:
            return row
        row.pointed += [(len(row.tokens) + i, cells) for i, cells in pointer.point(asked, scenes)]
        position = len(row.tokens) if conversation else start
        row.append(asked + answer, len(answer), turn, position)
    raise AssertionError("questions never end")


def _endless_questions(rng: random.Random, scenes: list[Scene], weights: Mapping[str, float]) -> Iterator[Question]:
    deck = QuestionDeck(scenes)
    while True:
        small_talk = bool(scenes) and rng.random() < 0.03
        yield draw_small_talk(rng, with_picture=True) if small_talk else deck.draw(rng, weights)


def photograph(scene: Scene, rng: random.Random) -> Image.Image:
    """Draws the scene at one of several sizes, sometimes via JPEG, then resizes it as the processor does."""
    image = render(scene, rng.choice((96, 96, 96, 112, 128, 160, 192, 224, 336)))
    if rng.random() < 0.1:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.randint(75, 95))
        image = Image.open(buffer)
    return image.resize((IMAGE_SIZE, IMAGE_SIZE), RESAMPLE)


def to_pixels(images: list[Image.Image]) -> torch.Tensor:
    """Normalises exactly as the checkpoint's image processor does."""
    stacked = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return (stacked.permute(0, 3, 1, 2).float() / 255 - PIXEL_MEAN) / PIXEL_STD


def _to_tensors(rows: list[Row], scenes: list[Scene], encode: Encode, images: list[Image.Image]) -> Batch:
    length = max(len(row.tokens) for row in rows)

    def padded(lists: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([items + [value] * (length - len(items)) for items in lists])

    turns = padded([row.turns for row in rows], -1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same_turn = turns[:, :, None] == turns[:, None, :]
    in_prefix = (turns == 0)[:, None, :]
    conversation = torch.tensor([row.conversation for row in rows])[:, None, None]
    colours, kinds = cell_labels(scenes)
    return Batch(
        tokens=padded([row.tokens for row in rows], encode(PAD)[0]),
        targets=padded([row.targets for row in rows], NOT_ASKED),
        positions=padded([row.positions for row in rows], 0),
        attention=(causal & (conversation | same_turn | in_prefix))[:, None],
        pixels=to_pixels(images),
        cell_colours=colours,
        cell_kinds=kinds,
        words=torch.tensor([(i, at) for i, row in enumerate(rows) for at, _ in row.pointed]).reshape(-1, 2),
        word_cells=torch.tensor([cells for row in rows for _, cells in row.pointed]).reshape(-1, ALL_CELLS),
    )


def cell_labels(scenes: list[Scene]) -> tuple[torch.Tensor, torch.Tensor]:
    colours = torch.zeros(len(scenes), GRID * GRID, dtype=torch.long)
    kinds = torch.zeros_like(colours)
    for i, scene in enumerate(scenes):
        for shape in scene.shapes:
            colours[i, shape.cell] = 1 + list(COLOURS).index(shape.colour)
            kinds[i, shape.cell] = 1 + SHAPES.index(shape.kind)
    return colours, kinds
