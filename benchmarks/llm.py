"""The decode engine against Hugging Face `generate`, on the CPU and on one checkpoint with random weights.

    python -m benchmarks.llm [--rounds 10] [--threads 2] [--output FILE]

The language half has about 40 million parameters. Prompts have 128 tokens; answers have 64 new tokens, greedy, float32.
Both engines answer the same prompts in turns, in one run: batches of 1 and 8, and 32 concurrent requests against
sequential calls of `generate`.

`overhead` is the time of `LLMEngine.step` beyond the model's forward pass in a step that decodes 8 sequences:
scheduling, the layout of the step, sampling. `steps` compares steps with and without Raylens' kernels, in turns, by the
number of sequences and their position; each side uses its best number of threads. `read_share` is the speed at which a
step of one sequence reads the weights, relative to a plain sum over memory of that size, measured beside it.

Neither side converts tokens to text. The last line is one JSON document. Checks are ratios of best times, because other
programs use the machine, too.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration, PreTrainedModel

from benchmarks.answers import NEW_TOKENS, PARAMS, PROMPT_TOKENS, Prompts, answer, compare, make_prompts
from benchmarks.decode_steps import make_engine, measure_steps
from benchmarks.document import at_least, at_most, publish, this_machine
from benchmarks.random_checkpoint import make_checkpoint
from raylens.llm.engine import LLMEngine
from raylens.preprocess.schema import ProcessedPrompt

TARGETS = {"batch_1": 1.2, "batch_8": 1.5, "concurrent_32": 3.0}
"""Minimum ratio of tokens per second to `generate`."""
OVERHEAD_MS = 0.3
STEP_RATIO, READ_SHARE = 2.2, 0.7
"""Minimum speed-up of steps by the kernels, and minimum share of the memory's speed."""


@torch.inference_mode()
def generate(model: PreTrainedModel, prompts: Prompts) -> Prompts:
    token_ids = torch.tensor(prompts)
    output = model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[:, PROMPT_TOKENS:].tolist()  # type: ignore[no-any-return]


def generate_in_turn(model: PreTrainedModel, prompts: Prompts) -> Prompts:
    return [generate(model, [prompt])[0] for prompt in prompts]


@torch.inference_mode()
def measure_overhead(engine: LLMEngine, prompts: Prompts) -> dict[str, float]:
    """Returns median milliseconds of a step that decodes all `prompts`: total, forward pass, and difference."""
    forward, spent = engine._runner.forward, 0.0

    def timed_forward(*args: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        result = forward(*args)
        spent = time.perf_counter() - start
        return result

    engine._runner.forward = timed_forward  # type: ignore[assignment]
    steps = []
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), ProcessedPrompt(prompt, [], []), [], PARAMS)
    while engine.has_unfinished():
        start = time.perf_counter()
        outputs = engine.step()
        step = time.perf_counter() - start
        if len(outputs) == len(prompts) and outputs[0].num_output_tokens > 1:
            steps.append((step, spent))
    engine._runner.forward = forward
    return {
        "step_ms": round(statistics.median(step for step, _ in steps) * 1e3, 3),
        "forward_ms": round(statistics.median(own for _, own in steps) * 1e3, 3),
        "overhead_ms": round(statistics.median(step - own for step, own in steps) * 1e3, 3),
    }


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    num_parameters = make_checkpoint(folder)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    engine = make_engine(folder)
    prompts = make_prompts(32)
    answer(engine, prompts)
    generate(model, prompts[:8])
    # A step reads only one row of the embedding per token.
    num_weights = num_parameters - model.get_input_embeddings().weight.numel()
    threads = torch.get_num_threads()
    steps = measure_steps(folder, rounds, num_weights * 4, threads)
    torch.set_num_threads(threads)
    return {
        "parameters": num_parameters,
        "steps": steps,
        "batch_1": compare(lambda: answer(engine, prompts[:1]), lambda: generate(model, prompts[:1]), rounds),
        "batch_8": compare(lambda: answer(engine, prompts[:8]), lambda: generate(model, prompts[:8]), rounds),
        "concurrent_32": compare(lambda: answer(engine, prompts), lambda: generate_in_turn(model, prompts), 1),
        "overhead": min((measure_overhead(engine, prompts[:8]) for _ in range(rounds)), key=lambda o: o["overhead_ms"]),
    }


def checks_of(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    checks: dict[str, dict[str, Any]] = {}
    checks |= {name: at_least(measured[name]["ratio"], target) for name, target in TARGETS.items()}
    checks["overhead_ms"] = at_most(measured["overhead"]["overhead_ms"], OVERHEAD_MS)
    for name, step in measured["steps"].items():
        checks[f"step {name}"] = at_least(step["ratio"], STEP_RATIO)
        if name.startswith("1x"):
            checks[f"read share {name}"] = at_least(step["read_share"], READ_SHARE)
    checks["equal_tokens"] = at_least(sum(measured[name]["equal"] for name in TARGETS), len(TARGETS))
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="how often each side answers; the best time counts")
    parser.add_argument("--threads", type=int, default=2, help="for both sides")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options.rounds)
    for name, figures in measured.items():
        print(f"{name}: {figures}")
    document = {"checks": checks_of(measured), "measured": measured, "machine": this_machine(threads=options.threads)}
    publish(document, options.output)


if __name__ == "__main__":
    main()
