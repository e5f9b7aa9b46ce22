"""The measured limits of a device, and the options and timers that benchmarks on it share."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.document import this_machine

_ROUNDS = 10


@dataclass(frozen=True)
class Limits:
    """The measured limits of the device: bytes a second of a copy, read and written, and operations a second of a
    large matrix product in the dtype of the benchmark."""

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
    """Returns the dtype in which the device computes, as the servers' settings have it by default."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def now(device: torch.device) -> float:
    """Returns the time when all that was launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(device: torch.device, action: Callable[[], object], rounds: int) -> float:
    """Returns the best time of several, after a first one that does not count."""
    action()
    times = []
    for _ in range(rounds):
        start = now(device)
        action()
        times.append(now(device) - start)
    return min(times)


def device_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks of a device have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, whose figures mean nothing: tries the code")
    parser.add_argument("--output", type=Path, help="also write the JSON document there")
    return parser


def chosen_device(parser: argparse.ArgumentParser, options: argparse.Namespace) -> torch.device:
    """Returns the device of the options. Ends the program where PyTorch does not see it."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(1, f"{parser.prog}: needs a CUDA GPU, and PyTorch sees none\n")
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def machine_of(device: torch.device) -> dict[str, Any]:
    """Returns what `this_machine` does, with the device's name."""
    return this_machine(device=device_name(device), transformers=transformers.__version__)
