"""Stands in for a GPU: a device that runs what it is given in order, and only when the host waits for it.

So each step writes to the cache as late as it ever may: when the host has long scheduled the next step, and may have
given the blocks of this one to others.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.sampler import ChosenTokens, SampledToken, choose
from raylens.llm.sampling.sampler_state import SamplerState
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.step_input import StepInput, StepOutput


@dataclass(eq=False)
class Later:
    """A tensor that the device has not made yet."""

    queue: deque[Callable[[], None]]
    value: torch.Tensor | None = None
    device = torch.device("cpu")

    def __getitem__(self, rows: torch.Tensor) -> "Later":
        chosen = Later(self.queue)

        def compute() -> None:
            chosen.value = self.made()[rows]

        self.queue.append(compute)
        return chosen

    def made(self) -> torch.Tensor:
        assert self.value is not None, "the device ran out of order"
        return self.value


@dataclass
class DeferredDevice:
    """`num_idle_launches`: how many steps found the device with nothing to do. `events`: what the host did, in order:
    launched a step, or read one."""

    queue: deque[Callable[[], None]] = field(default_factory=deque)
    num_idle_launches: int = 0
    events: list[str] = field(default_factory=list)

    @classmethod
    def under(cls, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> "DeferredDevice":
        """Puts such a device under an engine on the CPU."""
        device = cls()
        runner = engine._runner

        def run(chunks: Sequence[ScheduledChunk], chosen: Any) -> StepOutput:
            return device.launch(runner.run_step, _copied(runner._builder.build(chunks, chosen)))

        monkeypatch.setattr(runner, "run", run)
        monkeypatch.setattr("raylens.llm.step_in_flight.choose", device.choose)
        return device

    def launch(self, run_step: Callable[[StepInput], StepOutput], step: StepInput) -> StepOutput:
        self.events.append("launch")
        self.num_idle_launches += not self.queue
        logits: Any = Later(self.queue)

        def compute() -> None:
            if step.fed is not None:
                source: Any = step.fed.chosen
                step.fed = replace(step.fed, chosen=source.made())
            logits.value = run_step(step).logits.clone()  # the next step's come to the same memory

        self.queue.append(compute)
        return StepOutput(logits, [])

    def choose(self, logits: Any, states: Sequence[SamplerState]) -> "LateTokens":
        tokens = LateTokens(self)

        def compute() -> None:
            tokens.chosen = choose(logits.made(), states)
            tokens.token_ids.value = tokens.chosen.token_ids

        self.queue.append(compute)
        return tokens

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.queue.popleft()()


class LateTokens:
    """ChosenTokens of the device."""

    def __init__(self, device: DeferredDevice) -> None:
        self._device = device
        self.token_ids = Later(device.queue)
        self.chosen: ChosenTokens | None = None

    def read(self) -> list[SampledToken | None]:
        self._device.events.append("read")
        self._device.run_until(lambda: self.chosen is not None)
        assert self.chosen is not None
        return self.chosen.read()


def _copied(step: StepInput) -> StepInput:
    """A step in memory of its own, as one that goes to a GPU."""
    tensors = {name: getattr(step, name).clone() for name in ("token_ids", "positions", "slot_mapping", "logits_rows")}
    return replace(
        step,
        **tensors,
        block_tables=[[*table] for table in step.block_tables],
        query_lengths=[*step.query_lengths],
        context_lengths=[*step.context_lengths],
    )
