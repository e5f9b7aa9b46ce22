"""The decode engine against Hugging Face `generate`, on the CPU and on one checkpoint with random weights.

    python -m benchmarks.llm [--rounds 10] [--threads 2] [--step-threads 1] [--output FILE]

A language half of about 40 million parameters; prompts of 128 tokens, 64 new tokens each, greedy, float32. Both answer
the same prompts in turns, in one run: 1 and 8 at a time, and 32 at once against `generate` called for one after
another. `overhead` is what `LLMEngine.step` takes beyond the model's forward pass in a step that decodes 8 sequences:
scheduling, the layout of the step, sampling. `steps` compares steps with Raylens' kernels and without them, in turns:
so many sequences decode, each at such a position. `read_share` is how fast the step of one sequence reads the weights,
compared with a plain sum over memory of that size, measured beside it. Neither side makes text of its tokens; who reads
the engine's outputs does that beside its next step. The last line is one JSON document; a check is a ratio of the best
times, for others use the machine too.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, LlavaForConditionalGeneration, PreTrainedModel

from benchmarks.document import publish
from checkpoints import BUNDLED_MODEL
from cpu_kernels.library import VARIABLE
from llm.config import EngineConfig
from llm.engine import LLMEngine
from llm.sampling_params import SamplingParams
from llm.scheduler import ScheduledChunk
from llm.sequence import Sequence
from preprocess.schema import ProcessedPrompt

PROMPT_TOKENS, NEW_TOKENS = 128, 64
TEXT_CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
}
TARGETS = {"batch_1": 1.2, "batch_8": 1.5, "concurrent_32": 3.0}
"""Tokens a second over those of `generate`, at least."""
OVERHEAD_MS = 0.3
STEPS = ((1, 42), (1, 300), (8, 42), (8, 300), (8, 1000), (16, 300))
"""Numbers of sequences that decode, and the position that each of them is at."""
STEP_RATIO, READ_SHARE = 2.2, 0.7
"""How many times as fast steps are with kernels, at least, and the least share of the memory's speed."""
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)

Prompts = list[list[int]]


def make_checkpoint(folder: Path) -> int:
    """Random weights, spread out so that answers depend on the prompt. Returns parameters of the language half."""
    config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    for name, value in TEXT_CONFIG.items():
        setattr(config.text_config, name, value)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.5 if "embed_tokens" in name else 0.05)
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(BUNDLED_MODEL).save_pretrained(folder)
    parts = (model.model.language_model, model.lm_head)
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


def make_prompts(count: int) -> Prompts:
    tokens = torch.randint(10, 200, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    return tokens.tolist()


@torch.inference_mode()
def answer(engine: LLMEngine, prompts: Prompts) -> Prompts:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), ProcessedPrompt(prompt, [], []), [], PARAMS)
    answers: Prompts = [[] for _ in prompts]
    while engine.has_unfinished():
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
    return answers


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


def timed(action: Callable[[], Prompts]) -> tuple[float, Prompts]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def compare(ours: Callable[[], Prompts], theirs: Callable[[], Prompts], rounds: int) -> dict[str, Any]:
    """Tokens a second of both, in turns, by their best times, and whether all tokens were the same."""
    our_times, their_times, is_equal = [], [], True
    for _ in range(rounds):
        our_time, our_answers = timed(ours)
        their_time, their_answers = timed(theirs)
        our_times.append(our_time)
        their_times.append(their_time)
        is_equal &= our_answers == their_answers
    num_tokens = sum(map(len, their_answers))
    return {
        "tokens_per_second": round(num_tokens / min(our_times), 1),
        "generate_tokens_per_second": round(num_tokens / min(their_times), 1),
        "ratio": round(min(their_times) / min(our_times), 3),
        "equal": is_equal,
    }


@torch.inference_mode()
def measure_overhead(engine: LLMEngine, prompts: Prompts) -> dict[str, float]:
    """Milliseconds of a step that decodes all `prompts`, medians: in all, in the forward pass, and the difference."""
    forward, spent = engine._runner.forward, 0.0

    def timed_forward(*args: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        result = forward(*args)
        spent = time.perf_counter() - start
        return result

    engine._runner.forward = timed_forward  # type: ignore[method-assign, assignment]
    steps = []
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), ProcessedPrompt(prompt, [], []), [], PARAMS)
    while engine.has_unfinished():
        start = time.perf_counter()
        outputs = engine.step()
        step = time.perf_counter() - start
        if len(outputs) == len(prompts) and outputs[0].num_output_tokens > 1:
            steps.append((step, spent))
    engine._runner.forward = forward  # type: ignore[method-assign]
    return {
        "step_ms": round(statistics.median(step for step, _ in steps) * 1e3, 3),
        "forward_ms": round(statistics.median(own for _, own in steps) * 1e3, 3),
        "overhead_ms": round(statistics.median(step - own for step, own in steps) * 1e3, 3),
    }


def make_engine(folder: Path, kernels: str = "") -> LLMEngine:
    """Prompts come again in each round: without the prefix cache they are computed again, as `generate` does."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = kernels
    try:
        return LLMEngine(EngineConfig(str(folder), max_num_seqs=32, kv_cache_bytes=2**28, prefix_caching=False))
    finally:
        os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})


def decode_step(engine: LLMEngine, num_sequences: int, position: int) -> Callable[[], object]:
    """A step that computes the token at `position` of each sequence, in blocks one behind the other."""
    blocks = -(-(position + 1) // 16)
    chunks = []
    for index in range(num_sequences):
        sequence = Sequence(str(index), [10 + index] * (position + 1), position, [], position + 2)
        sequence.block_table = list(range(index * blocks, (index + 1) * blocks))
        sequence.num_computed_tokens = position
        chunks.append(ScheduledChunk(sequence, 1))
    return lambda: engine._runner.run(chunks)


@torch.inference_mode()
def measure_steps(folder: Path, rounds: int, num_weight_bytes: int) -> dict[str, Any]:
    """Milliseconds of steps with kernels and without them, best times in turns (ABBA)."""
    engines = {"kernels": make_engine(folder), "pytorch": make_engine(folder, "off")}
    memory = torch.ones(num_weight_bytes // 4)
    measured: dict[str, Any] = {}
    for num_sequences, position in STEPS:
        actions = {name: decode_step(engine, num_sequences, position) for name, engine in engines.items()}
        actions["read"] = memory.sum
        times: dict[str, list[float]] = {name: [] for name in actions}
        for turn in range(2 * rounds):
            for name in sorted(actions, reverse=turn % 2 == 1):
                actions[name]()  # what the others have left in the processor's caches is gone
                start = time.perf_counter()
                actions[name]()
                times[name].append(time.perf_counter() - start)
        best = {name: min(own) for name, own in times.items()}
        measured[f"{num_sequences}x{position}"] = {
            **{f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in best.items()},
            "ratio": round(best["pytorch"] / best["kernels"], 3),
            "read_share": round(best["read"] / best["kernels"], 3),
        }
    return measured


def measure(folder: Path, rounds: int, step_threads: int) -> dict[str, Any]:
    num_parameters = make_checkpoint(folder)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    engine = make_engine(folder)
    prompts = make_prompts(32)
    answer(engine, prompts)
    generate(model, prompts[:8])
    # Of the embedding a step reads a row for each token.
    num_weights = num_parameters - model.get_input_embeddings().weight.numel()
    threads = torch.get_num_threads()
    torch.set_num_threads(step_threads)
    steps = measure_steps(folder, rounds, num_weights * 4)
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
    checks = {}
    for name, target in TARGETS.items():
        value = measured[name]["ratio"]
        checks[name] = {"value": value, "target": target, "ok": value >= target}
    overhead = measured["overhead"]["overhead_ms"]
    checks["overhead_ms"] = {"value": overhead, "target": OVERHEAD_MS, "ok": overhead < OVERHEAD_MS}
    for name, step in measured["steps"].items():
        checks[f"step {name}"] = {"value": step["ratio"], "target": STEP_RATIO, "ok": step["ratio"] >= STEP_RATIO}
        if name.startswith("1x"):
            share = step["read_share"]
            checks[f"read share {name}"] = {"value": share, "target": READ_SHARE, "ok": share >= READ_SHARE}
    num_equal = sum(measured[name]["equal"] for name in TARGETS)
    checks["equal_tokens"] = {"value": num_equal, "target": len(TARGETS), "ok": num_equal == len(TARGETS)}
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="how often each side answers; the best time counts")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch, for both sides")
    parser.add_argument("--step-threads", type=int, default=1, help="of PyTorch, for the comparison of steps")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), options.rounds, options.step_threads)
    for name, figures in measured.items():
        print(f"{name}: {figures}")
    machine = {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": options.threads,
        "step_threads": options.step_threads,
        "torch": torch.__version__,
    }
    document = {"checks": checks_of(measured), "measured": measured, "machine": machine}
    publish(document, options.output)


if __name__ == "__main__":
    main()
