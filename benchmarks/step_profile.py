"""Profiles an engine step: kernels, launches, and the host's work between them.

    python -m benchmarks.step_profile [--output FILE]

It uses the engine of `benchmarks.llm_cuda`, and profiles steps that decode 1 and 64 sequences, and the step that
computes a long prompt. `step_ms` is measured without the profiler, all other figures with it: `profiled_ms` by the
host's clock, `busy_ms` of the device, `idle_ms` of the device between a step's first kernel and the end of its last
one, the host's launch calls, and the kernels with the most time. On the CPU, PyTorch's operations stand for kernels and
launches. The last line is one JSON document.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.answers import add_requests, make_prompts, run_to_end
from benchmarks.document import publish
from benchmarks.gpu_limits import Figures, chosen_device, device_parser, measure_all, now
from benchmarks.random_engine import Shape, make_engine
from raylens.llm.engine import LLMEngine

BATCHES = (1, 64)
NUM_STEPS, NUM_KERNELS = 10, 12
_MOST_NAME = 100
_LAUNCHES = ("LaunchKernel", "GraphLaunch", "Memcpy", "Memset")
"""Substrings of the CUDA calls that launch work."""

Interval = tuple[float, float]


def profiled(device: torch.device, run_step: Callable[[], object], num_steps: int) -> Figures:
    run_step()
    started = now(device)
    for _ in range(num_steps):
        run_step()
    seconds = (now(device) - started) / num_steps
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        started = now(device)
        for _ in range(num_steps):
            run_step()
        profiled_seconds = (now(device) - started) / num_steps
    figures = {"step_ms": round(seconds * 1e3, 3), "profiled_ms": round(profiled_seconds * 1e3, 3)}
    return figures | summary(profiler.events() or [], device, num_steps)


def summary(events: Sequence[Any], device: torch.device, num_steps: int) -> Figures:
    """Summarizes the profiler's events of a step. Times are in milliseconds a step."""
    on_host = [event for event in events if event.device_type.name == "CPU"]
    if device.type == "cuda":
        work = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
        launches = [event for event in on_host if any(part in event.name for part in _LAUNCHES)]
    else:
        work = launches = [event for event in on_host if event.cpu_parent is None and event.name.startswith("aten::")]
    spans = [(event.time_range.start, event.time_range.end) for event in work]
    busy = busy_time(spans)
    whole = max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in work:
        by_name[event.name].append(event.time_range.end - event.time_range.start)
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]
    scale = 1e3 * num_steps  # from microseconds
    return {
        "busy_ms": round(busy / scale, 3),
        "idle_ms": round((whole - busy) / scale, 3),
        "kernels": round(len(work) / num_steps, 1),
        "launches": round(len(launches) / num_steps, 1),
        "top": [
            {"name": name[:_MOST_NAME], "ms": round(sum(times) / scale, 4), "calls": round(len(times) / num_steps, 1)}
            for name, times in top
        ],
    }


def busy_time(spans: Sequence[Interval]) -> float:
    """Returns the length of the spans' union, because kernels of several streams overlap."""
    busy, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


@torch.inference_mode()
def profile_decode(engine: LLMEngine, shape: Shape, device: torch.device, batch: int) -> Figures:
    num_new = 2 * NUM_STEPS + 8
    add_requests(engine, make_prompts(batch, shape.prompt_length(batch)), num_new)
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in engine.step()}
    figures = profiled(device, engine.step, NUM_STEPS)
    run_to_end(engine)
    return figures


@torch.inference_mode()
def profile_prefill(engine: LLMEngine, shape: Shape, device: torch.device) -> Figures:
    prompts = make_prompts(1, shape.long_prompt_tokens)

    def prefill() -> None:
        add_requests(engine, prompts, 1)
        run_to_end(engine)

    return profiled(device, prefill, 2)


def main() -> None:
    parser = device_parser(__doc__)
    options = parser.parse_args()
    device = chosen_device(parser, options)
    shape = Shape.of(device, tiny=options.tiny)
    if not options.tiny:
        shape = replace(shape, batches=tuple(one for one in BATCHES if one in shape.batches))
    engine = make_engine(shape, device)
    measurements: dict[str, Callable[[], Figures]] = {
        f"decode_{batch}": partial(profile_decode, engine, shape, device, batch) for batch in shape.batches
    }
    measurements["prefill"] = partial(profile_prefill, engine, shape, device)
    publish(measure_all(measurements, device, options.output, {}), options.output)


if __name__ == "__main__":
    main()
