"""The decode engine on a GPU against the GPU's limit, and against Hugging Face `generate`.

    python -m benchmarks.llm_cuda [decode] [prefill] [generate] [--rounds 3] [--output FILE]

The model is the language half of LLaVA 1.5 7B with random weights in bfloat16, made on the GPU. Each decode step must
read the weights and the KV cache once. `decode` relates a step's time with 1, 8, 64 and 256 sequences to a plain copy's
bandwidth for these bytes, and reports the time without asynchronous scheduling. Batches whose cache exceeds the GPU's
memory are left out. `prefill` relates a prompt of 4,096 tokens to the rate of a large matrix product. `generate` runs
the same model on the same prompts of 1 and 64 sequences, with its default cache and with its static cache, which it
compiles; tokens per second exclude the first token of each answer. Without a name, all three run. The last line is one
JSON document.
"""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.answers import Prompts, add_requests, generate, make_prompts, run_to_end
from benchmarks.document import publish
from benchmarks.gpu_limits import (
    Figures,
    Limits,
    chosen_device,
    device_parser,
    measure_all,
    measure_limits,
    seconds_of,
)
from benchmarks.random_engine import Shape, make_engine
from raylens.llm.engine import LLMEngine
from raylens.modeling.merged_linear import LaterPart, MergedLinear

GENERATED_BATCHES = (1, 64)
TARGETS = {"decode_1": 0.80, "decode_64": 0.65, "prefill": 0.55}
"""Minimum shares of the limit."""


@dataclass(frozen=True)
class Bench:
    """An engine on the device, and the device's limits."""

    device: torch.device
    shape: Shape
    limits: Limits
    engine: LLMEngine
    rounds: int

    @classmethod
    def of(cls, device: torch.device, names: list[str], *, rounds: int, tiny: bool) -> "Bench":
        """`names`: the selected measurements."""
        shape = Shape.of(device, tiny=tiny)
        if names == ["prefill"]:
            shape = replace(shape, batches=(1,))  # the engine starts faster with fewer graphs
        return cls(device, shape, measure_limits(device, tiny=tiny), make_engine(shape, device), rounds)

    def prompts(self, batch: int) -> Prompts:
        return make_prompts(batch, self.shape.prompt_length(batch))


@torch.inference_mode()
def decode_steps(engine: LLMEngine, prompts: Prompts, num_new: int) -> tuple[list[tuple[float, int]], Prompts]:
    """Returns (seconds, positions read) of each step in which all sequences decode; and the answers."""
    add_requests(engine, prompts, num_new)
    steps: list[tuple[float, int]] = []
    answers: Prompts = [[] for _ in prompts]
    while engine.has_unfinished():
        is_prefill = any(len(answer) == 0 for answer in answers)
        num_positions = sum(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        start = time.perf_counter()
        outputs = engine.step()  # waits for the returned tokens
        seconds = time.perf_counter() - start
        for output in outputs:
            answers[int(output.request_id)] += output.token_ids
        if not is_prefill and len(outputs) == len(prompts):
            steps.append((seconds, num_positions))
    return steps, answers


def best_steps(bench: Bench, batch: int) -> tuple[list[tuple[float, int]], Prompts]:
    """Returns the steps of the fastest of several rounds after a warm-up."""
    measured = [
        decode_steps(bench.engine, bench.prompts(batch), bench.shape.new_tokens) for _ in range(bench.rounds + 1)
    ]
    return min(measured[1:], key=lambda one: sum(seconds for seconds, _ in one[0]))


def measure_decode(bench: Bench, batch: int) -> Figures:
    steps, _ = best_steps(bench, batch)
    seconds = sum(own for own, _ in steps)
    with mock.patch.object(bench.engine, "_goes_ahead", False):
        in_turn, _ = best_steps(bench, batch)
    weight_bytes = bench.shape.num_multiplied * bench.shape.dtype.itemsize
    num_bytes = sum(weight_bytes + num_positions * bench.shape.position_bytes for _, num_positions in steps)
    return {
        "tokens_per_second": round(batch * len(steps) / seconds, 1),
        "step_ms": round(seconds / len(steps) * 1e3, 3),
        "synchronous_step_ms": round(sum(own for own, _ in in_turn) / len(in_turn) * 1e3, 3),
        "gb_per_second": round(num_bytes / seconds / 1e9, 1),
        "share_of_limit": round(num_bytes / bench.limits.bandwidth / seconds, 3),
    }


@torch.inference_mode()
def measure_prefill(bench: Bench) -> Figures:
    shape, engine = bench.shape, bench.engine
    length = shape.long_prompt_tokens
    prompts = make_prompts(1, length)

    def prefill() -> None:
        add_requests(engine, prompts, 1)
        run_to_end(engine)

    seconds = seconds_of(bench.device, prefill, bench.rounds)
    # Only the last token passes the head. On average, a position attends to half of the prompt, in two products: with
    # keys and with values.
    width = shape.text["num_attention_heads"] * shape.text["head_dim"]
    seen = shape.text["num_hidden_layers"] * width * length
    operations = 2 * length * (shape.num_multiplied - shape.num_head_weights + seen)
    return {
        "tokens_per_second": round(length / seconds, 1),
        "prefill_ms": round(seconds * 1e3, 2),
        "tflops": round(operations / seconds / 1e12, 3),
        "share_of_limit": round(operations / bench.limits.matmul_rate / seconds, 3),
    }


def make_theirs(bench: Bench) -> PreTrainedModel:
    """Returns transformers' own model, sharing the engine's weights."""
    half = bench.engine._runner._model
    config = copy.deepcopy(half.config.text_config)
    with torch.device(bench.device):
        theirs = LlamaForCausalLM._from_config(config, dtype=bench.shape.dtype, attn_implementation="sdpa")
    weights = {name.replace("model.language_model.", "model."): own for name, own in unmerged(half).items()}
    theirs.load_state_dict(weights, assign=True)
    return theirs.eval()


def unmerged(half: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the weights by transformers' names, splitting the engine's merged layers."""
    weights = dict(half.state_dict())
    parts: dict[MergedLinear, Iterator[torch.Tensor]] = {}
    for name, module in half.named_modules():
        if isinstance(module, MergedLinear):
            parts[module] = iter(torch.split(module.weight, module.sizes))
            weights[f"{name}.weight"] = next(parts[module])
        elif isinstance(module, LaterPart):
            weights[f"{name}.weight"] = next(parts[module._first[0]])
    return weights


def measure_generate(bench: Bench, theirs: PreTrainedModel, batch: int) -> Figures:
    prompts = bench.prompts(batch)
    steps, answers = best_steps(bench, batch)
    rate = batch * len(steps) / sum(seconds for seconds, _ in steps)
    plain, their_answers = generate_rate(bench, theirs, prompts)
    compiled, _ = generate_rate(bench, theirs, prompts, cache_implementation="static")
    return {
        "tokens_per_second": round(plain, 1),
        "compiled_tokens_per_second": round(compiled, 1),
        "ratio": round(rate / plain, 2),
        "ratio_to_compiled": round(rate / compiled, 2),
        # Rounding differs between kernels, so later tokens may differ where two are nearly as likely.
        "equal_first_tokens": sum(own[0] == other[0] for own, other in zip(answers, their_answers, strict=True)),
    }


def generate_rate(bench: Bench, model: PreTrainedModel, prompts: Prompts, **settings: Any) -> tuple[float, Prompts]:
    """Returns tokens per second after the first ones, and the answers."""
    num_new, answers = bench.shape.new_tokens, Prompts()

    def answer(num_new: int) -> None:
        answers[:] = generate(model, prompts, num_new, **settings)

    first = seconds_of(bench.device, lambda: answer(1), bench.rounds)
    everything = seconds_of(bench.device, lambda: answer(num_new), bench.rounds)
    return len(prompts) * (num_new - 1) / (everything - first), answers


def measurements(bench: Bench, names: list[str]) -> dict[str, Callable[[], Figures]]:
    """Returns the measurements by the names of their figures."""
    found: dict[str, Callable[[], Figures]] = {}
    if "decode" in names:
        found |= {f"decode_{batch}": partial(measure_decode, bench, batch) for batch in bench.shape.batches}
    if "prefill" in names:
        found["prefill"] = partial(measure_prefill, bench)
    if "generate" in names:
        theirs, batches = make_theirs(bench), [one for one in GENERATED_BATCHES if one in bench.shape.batches]
        found |= {f"generate_{one}": partial(measure_generate, bench, theirs, one) for one in batches}
    return found


def measured_document(bench: Bench, names: list[str], output: Path | None) -> dict[str, Any]:
    known = {"limits": bench.limits.shown(), "has_graphs": bench.engine._runner._graphs is not None}
    return measure_all(measurements(bench, names), bench.device, output, TARGETS, **known)


def main() -> None:
    names = ["decode", "prefill", "generate"]
    parser = device_parser(__doc__, rounds=3)
    parser.add_argument("measured", nargs="*", metavar="NAME", help=f"{', '.join(names)} (default: all)")
    options = parser.parse_args()
    if unknown := set(options.measured) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(names)}")
    device = chosen_device(parser, options)
    chosen = options.measured or names
    bench = Bench.of(device, chosen, rounds=options.rounds, tiny=options.tiny)
    publish(measured_document(bench, chosen, options.output), options.output)


if __name__ == "__main__":
    main()
