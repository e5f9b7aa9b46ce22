"""Trains the tiny LLaVA checkpoint for coloured shapes from scratch, on a CPU or a GPU.

    python -m raylens.checkpoints.training.train_shapes --help

First the vision tower alone learns to name the shape in each cell of the 3x3 grid. Then the whole model learns to
answer questions. `checkpoints/training/judge_shapes.py` evaluates the result.
"""

# ruff: noqa: E402
from raylens.modeling.torchvision_build import make_importable

make_importable()  # before transformers is imported

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from raylens.checkpoints.training.pace import Pace, learning_rate_share
from raylens.checkpoints.training.questions import QuestionDeck, draw_small_talk
from raylens.checkpoints.training.shapes_model import (
    build_model,
    build_processor,
    build_tokenizer,
    load_processor,
    save_checkpoint,
)
from raylens.checkpoints.training.training_rows import (
    SEVERAL_PICTURES,
    SYSTEM_MESSAGES,
    build_batch,
    encoder_of,
    random_scenes,
)
from raylens.checkpoints.training.training_steps import (
    Learner,
    accuracy_by_kind,
    answer_loss,
    cell_accuracy,
    cell_loss,
    cells_batch,
)

HELD_OUT_SEED = 1_000_003  # never the seed of a training run
CELL_LOSS_WEIGHT = 0.1
WORD_LOSS_WEIGHT = 1.0
# Kinds that teach most about places are asked more often, and kinds that hardly depend on the picture less often.
KIND_WEIGHTS = {"describe": 1.5, "describe_one": 1.5, "place": 1.5, "where": 1.5, "count_images": 0.3}
EPILOG = """\
examples:
  python -m raylens.checkpoints.training.train_shapes                  # the whole training, an hour on two CPU cores
  python -m raylens.checkpoints.training.train_shapes --minutes 20     # the same in less time, with worse answers
  python -m raylens.checkpoints.training.train_shapes --resume --steps 1000 --learning-rate 5e-4 --weight count=3
                                                      # go on, asking the weak kinds more often
"""


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    device = torch.device(args.device)
    if args.resume:  # the weights know the tokens of their own tokenizer only
        processor = load_processor(args.output)
    else:
        processor = build_processor(build_tokenizer(corpus(random.Random(args.seed))))
    model = build_model(processor.tokenizer)
    learner = Learner(model, encoder_of(processor.tokenizer), device, bf16=args.bf16)
    args.state.parent.mkdir(parents=True, exist_ok=True)
    if args.resume:
        learner.load_state_dict(torch.load(args.state, map_location=device, weights_only=True))
        rng = random.Random(f"{args.seed} resumed at {learner.step}")
    say(f"{model.num_parameters():,} parameters on {device}, resumed: {args.resume}")

    def save() -> None:
        torch.save(learner.state_dict(), args.state)
        save_checkpoint(learner.model, processor, args.output)

    save()
    if not args.resume:
        learn_cells(learner, rng, args)
        save()
    learn_answers(learner, rng, args, save)
    save()
    report(learner, rows=256)
    say(f"saved {args.output}; judge it with: python -m raylens.checkpoints.training.judge_shapes {args.output}")


def learn_cells(learner: Learner, rng: random.Random, args: argparse.Namespace) -> None:
    """Runs stage 1: the vision tower, with a linear head that names each cell's colour and kind."""
    optimizer = adamw([learner.model.model.vision_tower, learner.cell_head], args)
    pace = Pace(args.vision_steps, args.vision_minutes)
    for step in range(args.vision_steps):
        progress = pace.progress(step)
        if progress >= 1:
            break
        set_learning_rate(optimizer, args.learning_rate * learning_rate_share(step, progress))
        loss = cell_loss(learner, cells_batch(rng, args.vision_rows))
        update(learner, optimizer, loss)
        if step % args.log_every == 0:
            say(f"cells  {pace.line(step, progress)}  loss {loss.item():.4f}")
        if step % (args.log_every * 10) == 0 and step:
            say(f"cells  held-out pictures fully right: {held_out_cells(learner):.1%}")
    say(f"cells  held-out pictures fully right: {held_out_cells(learner):.1%}")


def learn_answers(learner: Learner, rng: random.Random, args: argparse.Namespace, save: Callable[[], None]) -> None:
    """Runs stage 2: the whole model answers, with hints about the shapes in cells and the cells of words."""
    optimizer = adamw([learner.model, learner.cell_head, learner.word_head], args)
    weights = KIND_WEIGHTS | dict(args.weight)
    pace = Pace(args.steps, args.minutes)
    saved = time.monotonic()
    for step in range(args.steps):
        progress = pace.progress(step)
        if progress >= 1:
            break
        set_learning_rate(optimizer, args.learning_rate * learning_rate_share(step, progress))
        # One picture first: such rows hold more questions, and the learning transfers to several pictures.
        several = SEVERAL_PICTURES if args.resume else SEVERAL_PICTURES * min(1.0, 0.2 + 2 * progress)
        batch = build_batch(rng, learner.encode, args.rows, weights, several=several)
        answers, cells, words = answer_loss(learner, batch)
        update(learner, optimizer, answers + CELL_LOSS_WEIGHT * cells + WORD_LOSS_WEIGHT * words)
        learner.step += 1
        if step % args.log_every == 0:
            losses = f"loss {answers.item():.4f}  cells {cells.item():.4f}  words {words.item():.4f}"
            say(f"answers  {pace.line(step, progress)}  {losses}")
        if step and step % args.report_every == 0:
            report(learner, rows=48)
        if time.monotonic() - saved > args.save_minutes * 60:
            save()
            saved = time.monotonic()


def report(learner: Learner, rows: int) -> None:
    """Prints the share of held-out answers that are right in every token, as greedy decoding would give them."""
    rng = random.Random(HELD_OUT_SEED)
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for _ in range(rows // 16):
        batch = build_batch(rng, learner.encode, 16, {}, conversations=0.0)
        accuracy_by_kind(learner, batch, right, asked)
    parts = "  ".join(f"{kind} {right[kind] / asked[kind]:.0%}" for kind in sorted(asked))
    say(f"held-out {right.total() / asked.total():.2%} of {asked.total()}:  {parts}")


def held_out_cells(learner: Learner) -> float:
    return cell_accuracy(learner, cells_batch(random.Random(HELD_OUT_SEED), 256))


def adamw(modules: list[nn.Module], args: argparse.Namespace) -> torch.optim.AdamW:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.02)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def update(learner: Learner, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
    optimizer.step()


def corpus(rng: random.Random) -> Iterator[str]:
    """Yields text in the model's form, to train the tokenizer on."""
    yield from (f"{message}\n" for message in SYSTEM_MESSAGES for _ in range(50))
    for _ in range(3000):
        deck = QuestionDeck(random_scenes(rng))
        for question in (deck.draw(rng, {}), draw_small_talk(rng, with_picture=rng.random() < 0.8)):
            yield f"USER: {question.text} ASSISTANT: {question.answer}"
            yield f"\n{question.text} ASSISTANT:"


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EPILOG
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("checkpoints/shapes"), help="the Hugging Face folder to write")
    add("--state", type=Path, default=Path("build/shapes-training.pt"), help="float32 weights, for --resume")
    add("--resume", action="store_true", help="start stage 2 from --state instead of from nothing")
    add("--seed", type=int, default=0, help="same seed, same machine, no time limits: same weights")
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=default_device, help="cpu or cuda (default: %(default)s)")
    add(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="autocast; faster on new CPUs, too",
    )
    add("--learning-rate", type=float, default=1.5e-3, help="the peak, after warm-up (default: %(default)s)")
    add("--vision-steps", type=int, default=1000, help="steps of stage 1 (default: %(default)s)")
    add("--vision-rows", type=int, default=64, help="pictures in a step of stage 1 (default: %(default)s)")
    add("--steps", type=int, default=7000, help="steps of stage 2 (default: %(default)s)")
    add("--rows", type=int, default=16, help="rows of about 8 questions in a step (default: %(default)s)")
    add("--vision-minutes", type=float, help="bring stage 1 to its end in this time at the latest")
    add("--minutes", type=float, help="bring stage 2 to its end in this time at the latest")
    add(
        "--weight",
        type=kind_weight,
        action="append",
        default=[],
        metavar="KIND=W",
        help="ask it W times as often",
    )
    add(
        "--log-every",
        type=int,
        default=20,
        help="steps from one printed loss to the next (default: %(default)s)",
    )
    add("--report-every", type=int, default=250, help="steps between held-out reports (default: %(default)s)")
    add("--save-minutes", type=float, default=5, help="how often to write the files (default: %(default)s)")
    return parser.parse_args()


def kind_weight(text: str) -> tuple[str, float]:
    kind, _, weight = text.partition("=")
    return kind, float(weight)


if __name__ == "__main__":
    main()
