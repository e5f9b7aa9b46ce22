"""Asks the bundled model held-out questions over HTTP, through the whole pipeline, and counts exact answers.

    python -m benchmarks.shapes_accuracy [--count 500] [--url http://127.0.0.1:8000]

Scenes come from seeds that no training uses. Pictures are sent as PNG at any size from 96 to 512 pixels. Starts the
application itself unless `--url` names a running one. The last line is one JSON document; exits 1 below the target.
"""

import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

from openai import OpenAI
from PIL import Image

from benchmarks.document import at_least, make_parser, publish
from raylens.checkpoints import BUNDLED_MODEL
from raylens.checkpoints.training.questions import Question, QuestionDeck, draw_small_talk
from raylens.checkpoints.training.scenes import random_scenes, render
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.local_cluster import running_app
from tests.pictures import encoded, user_message

TARGET = 0.97
FIRST_SEED = 2_000_000_000  # training runs use small seeds


@dataclass(frozen=True, slots=True)
class Case:
    """One request of a user, with the right answer."""

    pictures: list[Image.Image]
    question: Question


def held_out_case(seed: int) -> Case:
    rng = random.Random(seed)
    scenes = random_scenes(rng)
    pictures = [render(scene, rng.randint(96, 512)) for scene in scenes]
    if rng.random() < 0.03:
        return Case(pictures, draw_small_talk(rng, with_picture=bool(scenes)))
    return Case(pictures, QuestionDeck(scenes).draw(rng, {}))


def ask(client: OpenAI, case: Case) -> str:
    message = user_message(case.question.text, *map(encoded, case.pictures))
    answer = client.chat.completions.create(model="shapes", messages=[message], temperature=0)
    return answer.choices[0].message.content or ""


def measure(url: str, count: int, concurrency: int) -> float:
    """Returns the share of exact answers among `count` held-out cases. Prints it per kind of question, and prints each
    miss."""
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=300)
    cases = [held_out_case(FIRST_SEED + number) for number in range(count)]
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda case: ask(client, case), cases))
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for case, answer in zip(cases, answers, strict=True):
        asked[case.question.kind] += 1
        right[case.question.kind] += answer == case.question.answer
        if answer != case.question.answer:
            print(f"  {case.question.text!r}: {answer!r}, expected {case.question.answer!r}")
    for kind in sorted(asked):
        print(f"{kind:12} {right[kind]:4} of {asked[kind]:4}")
    return right.total() / count


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--count", type=int, default=500, help="cases to ask (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--url", help="base URL of a running server")
    args = parser.parse_args()
    config = AppConfig(model=str(BUNDLED_MODEL))
    running = nullcontext(args.url) if args.url else running_app(config, host="127.0.0.1", port=free_port())
    with running as url:
        share = measure(url, args.count, args.concurrency)
    publish({"cases": args.count, "checks": {"exact_answers": at_least(share, TARGET)}}, args.output)
    return 0 if share >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
