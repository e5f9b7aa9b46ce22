"""Writes the example pictures and their questions, and checks that the checkpoint answers them right.

    python -m raylens.checkpoints.training.example_pictures

The pictures come from seeds that no training uses. Fails at the first wrong answer.
"""

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image

from raylens.checkpoints.training.judge_shapes import FIRST_HELD_OUT_SEED, User
from raylens.checkpoints.training.questions import describe
from raylens.checkpoints.training.scenes import Scene, random_scene, render

PICTURE_SIZE = 224
FIRST_EXAMPLE_SEED = FIRST_HELD_OUT_SEED + 1_000_000
SHAPES_IN_PICTURE = {"one": 3, "two": 4, "three": 2, "four": 2, "five": 1}


@dataclass(frozen=True, slots=True)
class Example:
    """One request: the pictures in order, the question, and the checkpoint's answer."""

    pictures: list[str]
    question: str
    answer: str


def choose_scenes() -> dict[str, Scene]:
    """Returns the first held-out scenes with the wanted number of shapes, in different colours and kinds."""
    scenes: dict[str, Scene] = {}
    seed = FIRST_EXAMPLE_SEED
    for name, count in SHAPES_IN_PICTURE.items():
        while True:
            seed += 1
            scene = random_scene(random.Random(seed), 4)
            colours = {shape.colour for shape in scene.shapes}
            kinds = {shape.kind for shape in scene.shapes}
            if len(scene.shapes) == count == len(colours) and len(kinds) >= min(count, 3):
                scenes[f"{name}.png"] = scene
                break
    return scenes


def choose_examples(scenes: dict[str, Scene]) -> list[Example]:
    one, two, three, four, five = scenes
    coloured = scenes[one].shapes[0]
    sought = scenes[two].shapes[-1]
    return [
        Example([one], f"What colour is the {coloured.kind}?", coloured.colour),
        Example([two], f"Where is the {sought.colour} {sought.kind}?", f"in the {sought.place}"),
        Example([two], "How many shapes are there?", "four"),
        Example([one], "Describe the picture.", describe(scenes[one])),
        Example([three, four, five], "What is in the second image?", describe(scenes[four])),
        Example([five, three, five], "Describe the third image.", describe(scenes[five])),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/shapes"), help="who has to answer")
    parser.add_argument("--output", type=Path, default=Path("checkpoints/pictures"), help="the folder to write")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    scenes = choose_scenes()
    for name, scene in scenes.items():
        render(scene, PICTURE_SIZE).save(args.output / name, optimize=True)
    examples = choose_examples(scenes)
    user = User(args.checkpoint)
    for example in examples:
        answer = user.ask([Image.open(args.output / name) for name in example.pictures], example.question)
        print(f"{' '.join(example.pictures)}: {example.question} -> {answer}")
        if answer != example.answer:
            raise SystemExit(f"the right answer is {example.answer!r}")
    lines = json.dumps([asdict(example) for example in examples], indent=2)
    (args.output / "questions.json").write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
