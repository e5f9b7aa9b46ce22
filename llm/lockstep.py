"""Rank 0 and the other ranks run the same steps: one tells, the others listen."""

from typing import Protocol

import torch

from llm.parallel import ProcessGroup, RankDiedError
from llm.step_input import StepInput
from llm.step_message import pack, unpack
from llm.step_output import StepOutput


class StepRunner(Protocol):
    def run_step(self, step: StepInput) -> StepOutput:
        """Computes the step on this rank's share of the model; the outputs of all ranks are the same."""


def run_on_all_ranks(runner: StepRunner, group: ProcessGroup, step: StepInput) -> StepOutput:
    """Rank 0: runs the step together with all ranks in `serve_steps` and returns its output.

    Raises RankDiedError for any failure: one in the middle of a step leaves the ranks at different collectives, so
    no later step can be trusted.
    """
    group.send(pack(step))
    try:
        return runner.run_step(step)
    except RankDiedError:
        raise
    except Exception as error:
        raise RankDiedError(f"rank 0 failed within a step: {error}") from error


@torch.inference_mode()
def serve_steps(runner: StepRunner, group: ProcessGroup) -> None:
    """Other ranks: runs every step that rank 0 sends, until it says stop.

    Raises RankDiedError when another rank is gone, and whatever the step itself raises; the process should end then.
    """
    while (step := unpack(group.receive())) is not None:
        runner.run_step(step)


def stop_ranks(group: ProcessGroup) -> None:
    """Rank 0: lets the others return from `serve_steps`."""
    group.send(pack(None))
