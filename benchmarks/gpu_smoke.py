"""The first minute on a GPU: does each engine run, are its steps recorded as CUDA graphs, does a replay give the same?

    python -m benchmarks.gpu_smoke {language,vision} [--output FILE]

`language` is the language half of a LLaVA of 0.5 B parameters: one prompt is computed, then decoded token by token.
`vision` is the tower and projector of LLaVA 1.5, with one picture. The weights are random, in bfloat16. `first_s` has
all that is done once: compilation, recording. `unrecorded_ms` is a step that the host launches kernel by kernel. The
last line is one JSON document.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.answers import Prompts, answer, make_prompts
from benchmarks.document import publish
from benchmarks.encoder_cuda import clip_load, distance, make_theirs
from benchmarks.encoder_cuda import make_engine as make_encoder
from benchmarks.gpu_limits import Figures, chosen_device, device_parser, measure_all, now, seconds_of
from benchmarks.llm_cuda import decode_steps
from benchmarks.random_engine import Shape, make_engine
from benchmarks.towers import encode_all, encode_in_batches
from raylens.llm.engine import LLMEngine

ROUNDS = 3


def first_seconds(device: torch.device, action: Callable[[], object]) -> float:
    started = now(device)
    action()
    return round(now(device) - started, 2)


def decode_ms(engine: LLMEngine, prompts: Prompts, num_new: int) -> tuple[float, list[int]]:
    """Returns the mean of the steps, and the tokens."""
    steps, answers = decode_steps(engine, prompts, num_new)
    return round(sum(seconds for seconds, _ in steps) / len(steps) * 1e3, 3), answers[0]


def measure_decode(engine: LLMEngine, shape: Shape, device: torch.device) -> Figures:
    prompts, num_new = make_prompts(1, shape.prompt_length(1)), shape.new_tokens
    first = first_seconds(device, lambda: answer(engine, prompts, num_new))
    replayed, tokens = decode_ms(engine, prompts, num_new)
    with patch.object(engine._runner, "_graphs", None):
        unrecorded, others = decode_ms(engine, prompts, num_new)
    return {
        "is_recorded": engine._runner._graphs is not None,
        "first_s": first,
        "ms": replayed,
        "unrecorded_ms": unrecorded,
        "equal_tokens": f"{sum(map(int.__eq__, tokens, others))} of {num_new}",
    }


def measure_prefill(engine: LLMEngine, shape: Shape, device: torch.device) -> Figures:
    prompts = make_prompts(1, shape.long_prompt_tokens)

    def prefill() -> None:
        answer(engine, prompts, 1)

    first = first_seconds(device, prefill)
    seconds = seconds_of(device, prefill, ROUNDS)
    rate = round(shape.long_prompt_tokens / seconds)
    return {"first_s": first, "ms": round(seconds * 1e3, 2), "tokens_per_second": rate}


def measure_tower(device: torch.device, *, tiny: bool) -> Figures:
    load = clip_load(tiny=tiny)
    item = load.items[:1]
    engine = make_encoder(load.config, device)
    theirs = make_theirs(engine, load.config, device)
    first = first_seconds(device, lambda: encode_all(engine, item))
    (found,), (expected,) = encode_all(engine, item), encode_in_batches(theirs, item, 1)
    graphs, encode = engine._graphs, partial(encode_all, engine, item)
    figures: Figures = {"first_s": first, "ms": round(seconds_of(device, encode, ROUNDS) * 1e3, 3)}
    if graphs is not None:
        with patch.object(graphs, "is_measured", True):
            figures["unrecorded_ms"] = round(seconds_of(device, encode, ROUNDS) * 1e3, 3)
    return {
        "is_recorded": graphs is not None and any(own.replays for own in graphs._graphs.values()),
        **figures,
        "distance_to_transformers": round(distance(found, expected), 4),
    }


def measurements(half: str, device: torch.device, *, tiny: bool) -> tuple[dict[str, Callable[[], Figures]], Figures]:
    """Returns the measurements of a half by their names, and what is known before them."""
    if half == "vision":
        return {"tower": partial(measure_tower, device, tiny=tiny)}, {}
    shape = Shape.of(device, small=True, tiny=tiny)
    started = time.monotonic()
    engine = make_engine(shape, device)
    measured: dict[str, Any] = {"engine_start_s": round(time.monotonic() - started, 2)}
    return {
        "decode": partial(measure_decode, engine, shape, device),
        "prefill": partial(measure_prefill, engine, shape, device),
    }, measured


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("half", choices=["language", "vision"])
    options = parser.parse_args()
    device = chosen_device(parser, options)
    torch.manual_seed(0)
    chosen, known = measurements(options.half, device, tiny=options.tiny)
    publish(measure_all(chosen, device, options.output, {}, **known), options.output)


if __name__ == "__main__":
    main()
