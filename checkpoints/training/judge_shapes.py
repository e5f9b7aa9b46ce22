"""Evaluates a shapes checkpoint as a user would: one question at a time, greedy, from the saved folder.

    python -m raylens.checkpoints.training.judge_shapes checkpoints/shapes

Uses the bf16 weights, `AutoProcessor`, the chat template and `generate`. Shares no code with the training steps, so
that a mistake in them shows here. Exits with status 1 below `--needed`.
"""

# ruff: noqa: E402
from raylens.modeling.torchvision_build import make_importable

make_importable()  # before transformers is imported

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from raylens.checkpoints.training.questions import Question, QuestionDeck, draw_small_talk
from raylens.checkpoints.training.scenes import render
from raylens.checkpoints.training.training_rows import random_scenes

FIRST_HELD_OUT_SEED = 2_000_000_000  # training runs use small seeds


@dataclass(frozen=True, slots=True)
class Case:
    """One request of a user, with the right answer."""

    pictures: list[Image.Image]
    question: Question


class User:
    """Sends pictures and a question to a checkpoint folder and reads the answer."""

    def __init__(self, folder: Path) -> None:
        auto: Any = AutoProcessor  # has no types of its own
        self.processor = auto.from_pretrained(folder)
        self.model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)

    def ask(self, pictures: Sequence[Image.Image], question: str) -> str:
        parts: list[dict[str, object]] = [{"type": "image"} for _ in pictures]
        parts.append({"type": "text", "text": question})
        messages = [{"role": "user", "content": parts}]
        prompt = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = self.processor(text=prompt, images=list(pictures) or None, return_tensors="pt")
        with torch.no_grad():
            output = self.model.generate(**inputs, do_sample=False)
        new_tokens = output[0, inputs["input_ids"].shape[1] :]
        answer: str = self.processor.decode(new_tokens, skip_special_tokens=True)
        return answer.strip()


def held_out_cases(count: int) -> Iterator[Case]:
    """Yields scenes from seeds that no training uses, of 96 to 512 pixels, with one question each."""
    for seed in range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + count):
        rng = random.Random(seed)
        scenes = random_scenes(rng)
        pictures = [render(scene, rng.randint(96, 512)) for scene in scenes]
        if rng.random() < 0.03:
            yield Case(pictures, draw_small_talk(rng, with_picture=bool(scenes)))
        else:
            yield Case(pictures, QuestionDeck(scenes).draw(rng, {}))


def main() -> None:
    args = parse_args()
    user = User(args.folder)
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for case in held_out_cases(args.count):
        answer = user.ask(case.pictures, case.question.text)
        group = case.question.kind if len(case.pictures) < 2 else f"{case.question.kind} (of several)"
        asked[group] += 1
        if answer == case.question.answer:
            right[group] += 1
        else:
            text, expected = case.question.text, case.question.answer
            print(f"wrong, {len(case.pictures)} pictures: {text!r} -> {answer!r}, not {expected!r}")
    for group in sorted(asked):
        print(f"{group:28} {right[group]:4} of {asked[group]:4}  {right[group] / asked[group]:7.1%}")
    share = right.total() / asked.total()
    print(f"{'all':28} {right.total():4} of {asked.total():4}  {share:7.1%}")
    sys.exit(0 if share >= args.needed else 1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("checkpoints/shapes"), help="checkpoint")
    parser.add_argument("--count", type=int, default=500, help="questions to ask (default: %(default)s)")
    parser.add_argument("--needed", type=float, default=0.97, help="share of right answers (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
