"""A device's measured limits, and the options and timers that its benchmarks share."""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.document import at_least, make_parser, save, this_machine

_ROUNDS = 10

Figures = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Measured limits of the device: bytes per second of a copy (read and written), and operations per second of a
    large matrix product in the benchmark's dtype."""

    bandwidth: float
    matmul_rate: float

    def shown(self) -> dict[str, float]:
        return {
            "copy_gb_per_second": round(self.bandwidth / 1e9, 1),
            "matmul_tflops": round(self.matmul_rate / 1e12, 3),
        }


def measure_limits(device: torch.device, *, tiny: bool) -> Limits:
    num_bytes, size = (2**24, 256) if tiny else (4 * 2**30, 8192)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = seconds_of(device, lambda: target.copy_(source), _ROUNDS)
    left, right = (torch.randn(size, size, dtype=dtype_of(device), device=device) for _ in range(2))
    matmul_seconds = seconds_of(device, lambda: left @ right, _ROUNDS)
    return Limits(2 * num_bytes / copy_seconds, 2 * size**3 / matmul_seconds)


def dtype_of(device: torch.device) -> torch.dtype:
    """Returns the dtype of the device's computation by the server's default settings."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def now(device: torch.device) -> float:
    """Returns the time after all launched work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(device: torch.device, action: Callable[[], object], rounds: int) -> float:
    """Returns the best time of several rounds after a warm-up."""
    action()
    times = []
    for _ in range(rounds):
        start = now(device)
        action()
        times.append(now(device) - start)
    return min(times)


def device_parser(description: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Returns a parser with the common options of device benchmarks."""
    parser = make_parser(description, rounds=rounds)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, whose figures mean nothing: tries the code")
    return parser


def chosen_device(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """Returns the device of the options. Ends the program if PyTorch does not see it."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(1, f"{parser.prog}: needs a CUDA GPU, and PyTorch sees none\n")
    return device


def machine_of(device: torch.device, **settings: Any) -> Figures:
    """Returns `this_machine` with what is known of the device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        settings |= {
            "device": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return this_machine(**{"device": "cpu"} | settings, transformers=transformers.__version__)


def measure_all(
    measurements: Mapping[str, Callable[[], Figures]],
    device: torch.device,
    output: Path | None,
    targets: Mapping[str, float],
    **measured: Any,
) -> Figures:
    """Returns the document of these measurements and of those `measured` before. Writes it to `output` after each, so a
    later failure loses nothing. `targets`: minimum shares of the limit, by the measurement's name."""
    document: Figures = {"checks": {}, "measured": measured, "machine": machine_of(device)}
    save(document, output)
    for name, measure in measurements.items():
        measured[name] = measure()
        print(name, measured[name], flush=True)
        if name in targets:
            document["checks"][name] = at_least(measured[name]["share_of_limit"], targets[name])
        save(document, output)
    return document
