"""The decode engine on a GPU against what the GPU could do at best, and against Hugging Face `generate`.

    python -m benchmarks.llm_cuda [--rounds 3] [--output [FILE]]

The language half of LLaVA 1.5 7B with random weights in bfloat16, made on the GPU. Each step of decoding has to read
the weights and the KV cache once; `decode_1` and `decode_64`, for 1 and 64 sequences, say how near its time comes to
that of so many bytes at the bandwidth of a plain copy. `prefill` says how near a prompt of 4,096 tokens comes to the
rate of a large matrix product. `generate` runs the same model on the same prompts, as it is and with its static cache,
which it compiles; tokens a second are those behind the first of each answer. The last line is one JSON document; with
--output it is also written to a file, by default results/<name of the GPU>.json beside this one.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import AutoConfig, AutoProcessor, LlamaForCausalLM, PreTrainedModel

from benchmarks.document import at_least, publish, this_machine
from checkpoints import BUNDLED_MODEL
from llm.attention import ATTENTION_NAME, register_paged_attention
from llm.config import DtypeName, EngineConfig
from llm.engine import LLMEngine
from llm.models.family import LanguageFamily
from llm.parallel import ProcessGroup
from llm.sampling_params import SamplingParams
from modeling.families import load_family
from preprocess.schema import ProcessedPrompt

TEXT_CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 32064,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
DTYPE_NAME: DtypeName = "bfloat16"
DTYPE: torch.dtype = getattr(torch, DTYPE_NAME)
BATCHES = (1, 64)
PROMPT_TOKENS, NEW_TOKENS, LONG_PROMPT_TOKENS = 512, 128, 4096
COPIED_BYTES, MATMUL_SIZE = 4 * 2**30, 8192
TARGETS = {"decode_1": 0.80, "decode_64": 0.65, "prefill": 0.55}
"""Shares of the limit, at least."""
RESULTS = Path(__file__).parent / "results"

Prompts = list[list[int]]


@dataclass(frozen=True)
class Limits:
    """What the GPU was measured to do: bytes a second of a copy, read and written, and operations a second."""

    bandwidth: float
    matmul_rate: float


def now(device: torch.device) -> float:
    """When all that was launched is done."""
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def seconds_of(device: torch.device, action: Callable[[], object], rounds: int) -> float:
    """The best time of several, after a first one that does not count."""
    action()
    times = []
    for _ in range(rounds):
        start = now(device)
        action()
        times.append(now(device) - start)
    return min(times)


def measure_limits(device: torch.device) -> Limits:
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = seconds_of(device, lambda: target.copy_(source), 10)
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=DTYPE, device=device) for _ in range(2))
    matmul_seconds = seconds_of(device, lambda: left @ right, 10)
    return Limits(2 * COPIED_BYTES / copy_seconds, 2 * MATMUL_SIZE**3 / matmul_seconds)


def make_folder(folder: Path) -> None:
    """A checkpoint without weights."""
    config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    for name, value in TEXT_CONFIG.items():
        setattr(config.text_config, name, value)
    config.tie_word_embeddings = False
    config.save_pretrained(folder)
    AutoProcessor.from_pretrained(BUNDLED_MODEL).save_pretrained(folder)


@torch.no_grad()
def random_half(config: EngineConfig, group: ProcessGroup | None = None) -> tuple[PreTrainedModel, LanguageFamily]:
    """Stands in for `load_language_half`. Weights are spread so that hidden states keep their size."""
    register_paged_attention()
    family = load_family("llm", "llava")
    hf_config = AutoConfig.from_pretrained(config.model)
    with torch.device(config.device):
        half = family.model_class._from_config(
            hf_config, dtype=getattr(torch, config.dtype), attn_implementation={"text_config": ATTENTION_NAME}
        )
    generator = torch.Generator(config.device).manual_seed(0)
    for parameter in half.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
    return half.eval().requires_grad_(False), family


def make_engine(folder: Path, device: torch.device) -> LLMEngine:
    num_tokens = max(max(BATCHES) * (PROMPT_TOKENS + NEW_TOKENS), 2 * LONG_PROMPT_TOKENS)
    with patch("llm.model_runner.load_language_half", random_half):
        return LLMEngine(
            EngineConfig(
                str(folder),
                dtype=DTYPE_NAME,
                device=str(device),
                kv_cache_bytes=num_tokens * position_bytes(),
                max_num_seqs=max(BATCHES),
                max_num_batched_tokens=LONG_PROMPT_TOKENS,
                prefix_caching=False,
            )
        )


def make_theirs(engine: LLMEngine, device: torch.device) -> PreTrainedModel:
    """transformers' own model on the same weights, which lie in memory once."""
    half = engine._runner._model
    config = copy.deepcopy(half.config.text_config)
    with torch.device(device):
        theirs = LlamaForCausalLM._from_config(config, dtype=DTYPE, attn_implementation="sdpa")
    weights = {name.replace("model.language_model.", "model."): own for name, own in half.state_dict().items()}
    theirs.load_state_dict(weights, assign=True)
    return theirs.eval()


def position_bytes() -> int:
    """Keys and values of one position, over all layers."""
    numbers = 2 * TEXT_CONFIG["num_hidden_layers"] * TEXT_CONFIG["num_key_value_heads"] * TEXT_CONFIG["head_dim"]
    return numbers * DTYPE.itemsize


def num_multiplied(engine: LLMEngine) -> int:
    """Weights that every token is multiplied with: all but the embeddings, of which a step reads a few rows."""
    model = engine._runner._model
    embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in embeddings)


def make_prompts(count: int, num_tokens: int) -> Prompts:
    tokens = torch.randint(10, 200, (count, num_tokens), generator=torch.Generator().manual_seed(1))
    return tokens.tolist()


def add_requests(engine: LLMEngine, prompts: Prompts, num_new: int) -> None:
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), ProcessedPrompt(prompt, [], []), [], params)


@torch.inference_mode()
def decode_steps(engine: LLMEngine, prompts: Prompts) -> tuple[list[tuple[float, int]], Prompts]:
    """Seconds of each step in which all sequences decode and the positions that it reads; the answers."""
    add_requests(engine, prompts, NEW_TOKENS)
    steps: list[tuple[float, int]] = []
    answers: Prompts = [[] for _ in prompts]
    while engine.has_unfinished():
        is_prefill = any(len(answer) == 0 for answer in answers)
        num_positions = sum(PROMPT_TOKENS + len(answer) for answer in answers)
        start = time.perf_counter()
        outputs = engine.step()  # it hands out tokens: nothing is left to wait for
        seconds = time.perf_counter() - start
        for output in outputs:
            answers[int(output.request_id)] += output.token_ids
        if not is_prefill and len(outputs) == len(prompts):
            steps.append((seconds, num_positions))
    return steps, answers


def measure_decode(
    engine: LLMEngine, theirs: PreTrainedModel, batch: int, limits: Limits, rounds: int
) -> dict[str, Any]:
    prompts = make_prompts(batch, PROMPT_TOKENS)
    decode_steps(engine, prompts)
    measured = [decode_steps(engine, prompts) for _ in range(rounds)]
    steps, answers = min(measured, key=lambda one: sum(seconds for seconds, _ in one[0]))
    seconds = sum(own for own, _ in steps)
    weight_bytes = num_multiplied(engine) * DTYPE.itemsize
    num_bytes = sum(weight_bytes + num_positions * position_bytes() for _, num_positions in steps)
    plain, their_answers = generate_rate(theirs, prompts, rounds, {})
    compiled, _ = generate_rate(theirs, prompts, rounds, {"cache_implementation": "static"})
    rate = batch * len(steps) / seconds
    return {
        "tokens_per_second": round(rate, 1),
        "step_ms": round(seconds / len(steps) * 1e3, 3),
        "share_of_limit": round(num_bytes / limits.bandwidth / seconds, 3),
        "generate_tokens_per_second": round(plain, 1),
        "compiled_generate_tokens_per_second": round(compiled, 1),
        "ratio": round(rate / plain, 2),
        "ratio_to_compiled": round(rate / compiled, 2),
        # Rounding differs between kernels: later tokens may differ where two are nearly as likely.
        "equal_first_tokens": sum(own[0] == other[0] for own, other in zip(answers, their_answers, strict=True)),
    }


def generate_rate(
    model: PreTrainedModel, prompts: Prompts, rounds: int, settings: dict[str, Any]
) -> tuple[float, Prompts]:
    """Tokens a second behind the first ones, and the answers."""
    token_ids = torch.tensor(prompts, device=model.device)
    answers: Prompts = []

    @torch.inference_mode()
    def generate(num_new: int) -> None:
        output = model.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **settings,
        )
        answers[:] = output[:, PROMPT_TOKENS:].tolist()

    first = seconds_of(model.device, lambda: generate(1), rounds)
    everything = seconds_of(model.device, lambda: generate(NEW_TOKENS), rounds)
    return len(prompts) * (NEW_TOKENS - 1) / (everything - first), answers


def measure_prefill(engine: LLMEngine, device: torch.device, limits: Limits, rounds: int) -> dict[str, Any]:
    (prompt,) = make_prompts(1, LONG_PROMPT_TOKENS)

    def prefill() -> None:
        add_requests(engine, [prompt], 1)
        while engine.has_unfinished():
            engine.step()

    seconds = seconds_of(device, prefill, rounds)
    # The head is multiplied with the last token only. A position sees half of the prompt on average, twice: its keys
    # and its values.
    head = TEXT_CONFIG["vocab_size"] * TEXT_CONFIG["hidden_size"]
    width = TEXT_CONFIG["num_attention_heads"] * TEXT_CONFIG["head_dim"]
    seen = TEXT_CONFIG["num_hidden_layers"] * width * LONG_PROMPT_TOKENS
    operations = 2 * LONG_PROMPT_TOKENS * (num_multiplied(engine) - head + seen)
    return {
        "tokens_per_second": round(LONG_PROMPT_TOKENS / seconds, 1),
        "prefill_ms": round(seconds * 1e3, 2),
        "share_of_limit": round(operations / limits.matmul_rate / seconds, 3),
    }


def measure(device: torch.device, rounds: int) -> dict[str, Any]:
    limits = measure_limits(device)
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        engine = make_engine(Path(folder), device)
    theirs = make_theirs(engine, device)
    measured: dict[str, Any] = {
        "limits": {
            "copy_gb_per_second": round(limits.bandwidth / 1e9, 1),
            "matmul_tflops": round(limits.matmul_rate / 1e12, 1),
        },
        "has_graphs": engine._runner._graphs is not None,
    }
    for batch in BATCHES:
        measured[f"decode_{batch}"] = measure_decode(engine, theirs, batch, limits, rounds)
    measured["prefill"] = measure_prefill(engine, device, limits, rounds)
    return measured


def checks_of(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    shares = {name: measured[name]["share_of_limit"] for name in TARGETS}
    return {name: at_least(shares[name], target) for name, target in TARGETS.items()}


def print_table(checks: dict[str, dict[str, Any]], measured: dict[str, Any]) -> None:
    for name, value in measured["limits"].items():
        print(f"{name:<24}{value:>10}")
    print(f"\n{'':<12}{'share':>8}{'target':>8}{'tokens/s':>12}{'generate':>12}{'compiled':>12}")
    for name, check in checks.items():
        figures = measured[name]
        rates = ("tokens_per_second", "generate_tokens_per_second", "compiled_generate_tokens_per_second")
        columns = "".join(f"{figures.get(rate, ''):>12}" for rate in rates)
        print(f"{name:<12}{check['value']:>8}{check['target']:>8}{columns}")


def results_file(device_name: str) -> Path:
    return RESULTS / f"{device_name.replace(' ', '_').replace('/', '_')}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each side answers; the best time counts")
    parser.add_argument("--output", type=Path, nargs="?", const=Path(), help="write the JSON document to a file, too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "benchmarks.llm_cuda needs a CUDA GPU, and PyTorch sees none\n")
    device = torch.device("cuda")
    measured = measure(device, options.rounds)
    checks = checks_of(measured)
    print_table(checks, measured)
    name = torch.cuda.get_device_name(device)
    machine = this_machine(gpu=name, transformers=transformers.__version__)
    document = {"checks": checks, "measured": measured, "machine": machine}
    publish(document, results_file(name) if options.output == Path() else options.output)


if __name__ == "__main__":
    main()
