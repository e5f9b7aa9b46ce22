"""Trains the weights of the bundled model from scratch, in an hour on two CPU cores.

    python -m raylens.checkpoints.training.train_shapes [--output build/shapes]

First the vision tower alone learns to name the shape in each cell of the 3x3 grid. Then the whole model learns to
answer questions. Tokenizer, chat template and configuration are the bundled ones. To evaluate the result, serve it, and
run `python -m benchmarks.shapes_accuracy --url http://127.0.0.1:8000`."""

# ruff: noqa: E402
from raylens.modeling.torchvision_build import make_importable

make_importable()  # before transformers is imported

import argparse
import math
import random
import shutil
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlavaForConditionalGeneration

from raylens.checkpoints import BUNDLED_MODEL
from raylens.checkpoints.training.scenes import SEVERAL_PICTURES
from raylens.checkpoints.training.training_rows import build_batch, encoder_of
from raylens.checkpoints.training.training_steps import Learner, answer_loss, cell_loss, cells_batch

LEARNING_RATE, WARM_UP_STEPS = 1.5e-3, 100
CELL_PICTURES, ANSWER_ROWS = 64, 16  # in a step; a row has about 8 questions
CELL_LOSS_WEIGHT, WORD_LOSS_WEIGHT = 0.1, 1.0
# Kinds that teach most about places are asked more often, and kinds that hardly depend on the picture less often.
KIND_WEIGHTS = {"describe": 1.5, "describe_one": 1.5, "place": 1.5, "where": 1.5, "count_images": 0.3}
LOG_STEPS = 20


def main() -> None:
    args = parse_args()
    shutil.copytree(BUNDLED_MODEL, args.output, dirs_exist_ok=True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    model = LlavaForConditionalGeneration(AutoConfig.from_pretrained(BUNDLED_MODEL))
    model.generation_config = GenerationConfig.from_pretrained(BUNDLED_MODEL)
    learner = Learner(model, encoder_of(AutoTokenizer.from_pretrained(BUNDLED_MODEL)), torch.device(args.device))
    learn_cells(learner, rng, args.vision_steps)
    learn_answers(learner, rng, args.steps)
    model.to(torch.bfloat16).save_pretrained(args.output)
    (args.output / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read it
    say(f"saved {args.output}")


def learn_cells(learner: Learner, rng: random.Random, num_steps: int) -> None:
    """Runs stage 1: the vision tower, with a linear head that names each cell's colour and kind."""
    optimizer = adamw([learner.model.model.vision_tower, learner.cell_head])
    for step in range(num_steps):
        loss = cell_loss(learner, cells_batch(rng, CELL_PICTURES))
        update(learner, optimizer, loss, step / num_steps, step)
        if step % LOG_STEPS == 0:
            say(f"cells  step {step}/{num_steps}  loss {loss.item():.4f}")


def learn_answers(learner: Learner, rng: random.Random, num_steps: int) -> None:
    """Runs stage 2: the whole model answers, with hints about the shapes in cells and the cells of words."""
    optimizer = adamw([learner.model, learner.cell_head, learner.word_head])
    for step in range(num_steps):
        progress = step / num_steps
        # One picture first: such rows hold more questions, and the learning transfers to several pictures.
        several = SEVERAL_PICTURES * min(1.0, 0.2 + 2 * progress)
        batch = build_batch(rng, learner.encode, ANSWER_ROWS, KIND_WEIGHTS, several)
        answers, cells, words = answer_loss(learner, batch)
        update(learner, optimizer, answers + CELL_LOSS_WEIGHT * cells + WORD_LOSS_WEIGHT * words, progress, step)
        if step % LOG_STEPS == 0:
            losses = f"loss {answers.item():.4f}  cells {cells.item():.4f}  words {words.item():.4f}"
            say(f"answers  step {step}/{num_steps}  {losses}")


def adamw(modules: list[nn.Module]) -> torch.optim.AdamW:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.02)


def update(learner: Learner, optimizer: torch.optim.Optimizer, loss: torch.Tensor, progress: float, step: int) -> None:
    """Takes an optimizer step. The learning rate has a linear warm-up, then a cosine decay to 2 % of its peak."""
    decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * decay
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
    optimizer.step()


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--output", type=Path, default=Path("build/shapes"), help="the Hugging Face folder to write")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same machine: same weights")
    parser.add_argument("--device", default=default_device, help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--vision-steps", type=int, default=1000, help="steps of stage 1 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=7000, help="steps of stage 2 (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
