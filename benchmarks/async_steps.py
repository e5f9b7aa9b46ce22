"""How much of the host's work asynchronous scheduling hides, with a stand-in for a GPU whose steps take 4 ms.

    python -m benchmarks.async_steps [--rounds 3] [--output FILE]

All that the host does for a step is real: it schedules, lays the step out, packs it into one array, has tokens chosen,
reads them, and goes on with their answers. Only the model is missing, and what the launch of its kernels takes. A step
is done 4 ms after its launch, or after the step before it is done. Its logits are numbers that were drawn before, of
the bundled model's vocabulary. The greedy choice among them is a few small operations of PyTorch on the CPU, in place
of as many launches.

Each case has so many streams. `ahead` and `in_turn` take turns within a round. `cycle_ms` is the median time from one
step's outputs to the next one's, and `host_ms` what of it is not spent waiting; `ratio` is that of `in_turn` over
`ahead`. Figures are medians of all rounds. The last line is one JSON document.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.document import at_least, publish, this_machine
from raylens.checkpoints import BUNDLED_MODEL
from raylens.cpu_kernels.library import VARIABLE
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler import ChosenTokens, SampledToken, choose
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.step_output import StepOutput
from raylens.preprocess.schema import ProcessedPrompt

STREAMS = (16, 64, 256)
PARAMS = SamplingParams(max_tokens=220, temperature=0.0, ignore_eos=True)
STEP_SECONDS = 0.004
LEAST_RATIO = 1.03
_WARM_STEPS = 20
_CPU = torch.device("cpu")

Figures = dict[str, float]


class WaitingDevice:
    """Stands for a GPU under an engine on the CPU. `waited`: how long the host has waited for it, in seconds."""

    def __init__(self, engine: LLMEngine) -> None:
        self._builder = engine._runner._builder
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(max(STREAMS), engine._runner.vocab_size, generator=generator)
        self._done_at = 0.0
        self.waited = 0.0

    def run(self, chunks: Sequence[ScheduledChunk], chosen: torch.Tensor | None) -> StepOutput:
        step = self._builder.build(chunks, chosen)
        step.sent(_CPU)  # as it would go to a GPU
        self._done_at = max(self._done_at, time.perf_counter()) + STEP_SECONDS
        return StepOutput(self._logits[: len(step.logits_rows)].clone(), [])

    def choose(self, logits: torch.Tensor, states: Sequence[SamplerState]) -> "LateTokens":
        return LateTokens(self, choose(logits, states), self._done_at)

    def wait_until(self, done_at: float) -> None:
        started = time.perf_counter()
        time.sleep(max(0.0, done_at - started))
        self.waited += time.perf_counter() - started


class LateTokens:
    """ChosenTokens that the host gets when their step is done."""

    def __init__(self, device: WaitingDevice, tokens: ChosenTokens, done_at: float) -> None:
        self._device, self._tokens, self._done_at = device, tokens, done_at
        self.token_ids = tokens.token_ids

    def read(self) -> list[SampledToken | None]:
        self._device.wait_until(self._done_at)
        return self._tokens.read()


def make_engine() -> LLMEngine:
    config = EngineConfig(
        str(BUNDLED_MODEL), max_num_seqs=max(STREAMS), max_num_batched_tokens=8192, kv_cache_bytes=2**28
    )
    with mock.patch.dict("os.environ", {VARIABLE: "off"}):
        return LLMEngine(config)


@torch.inference_mode()
def measure(engine: LLMEngine, num_streams: int, *, is_ahead: bool) -> Figures:
    device = WaitingDevice(engine)
    for index in range(num_streams):
        prompt = ProcessedPrompt([1, *range(10 + index % 100, 40 + index % 100)], [], [])
        engine.add_request(str(index), prompt, [], PARAMS)
    cycles, waits = [], []
    with (
        mock.patch.dict("os.environ", {VARIABLE: "off"}),
        mock.patch.object(engine, "_goes_ahead", is_ahead),
        mock.patch.object(engine._runner, "run", device.run),
        mock.patch("raylens.llm.step_in_flight.choose", device.choose),
    ):
        while engine.has_unfinished():
            started, waited = time.perf_counter(), device.waited
            if len(engine.step()) == num_streams:
                cycles.append(time.perf_counter() - started)
                waits.append(device.waited - waited)
    hosts = [cycle - wait for cycle, wait in zip(cycles, waits, strict=True)]
    return {
        "cycle_ms": statistics.median(cycles[_WARM_STEPS:]) * 1e3,
        "host_ms": statistics.median(hosts[_WARM_STEPS:]) * 1e3,
    }


def measure_all(rounds: int) -> dict[str, dict[str, Any]]:
    engine = make_engine()
    measured: dict[str, dict[str, list[Figures]]] = {}
    for turn, num_streams in product(range(rounds), STREAMS):
        case = measured.setdefault(f"{num_streams} streams", {"ahead": [], "in_turn": []})
        for side in list(case)[:: 1 if turn % 2 == 0 else -1]:
            case[side].append(measure(engine, num_streams, is_ahead=side == "ahead"))
    figures: dict[str, dict[str, Any]] = {}
    for case_name, sides in measured.items():
        own: dict[str, Any] = {
            side: {key: round(statistics.median(one[key] for one in rounds_), 3) for key in rounds_[0]}
            for side, rounds_ in sides.items()
        }
        figures[case_name] = own | {"ratio": round(own["in_turn"]["cycle_ms"] / own["ahead"]["cycle_ms"], 3)}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the JSON document here too")
    options = parser.parse_args()
    measured = measure_all(options.rounds)
    for case, figures in measured.items():
        print(f"{case:30} {figures}")
    document = {
        "checks": {case: at_least(figures["ratio"], LEAST_RATIO) for case, figures in measured.items()},
        "measured": measured,
        "machine": this_machine(step_seconds=STEP_SECONDS, python=sys.version.split()[0]),
    }
    publish(document, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
