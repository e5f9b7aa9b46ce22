"""Runs the same steps on all ranks: rank 0 sends each step, and the other ranks receive and run it."""

from typing import Protocol

import torch

from raylens.llm.ranks.parallel import ProcessGroup, RankDiedError
from raylens.llm.ranks.step_message import pack, unpack
from raylens.llm.step_input import StepInput, StepOutput


class StepRunner(Protocol):
    def run_step(self, step: StepInput) -> StepOutput:
        """Computes the step with this rank's share of the model. All ranks get the same output."""


def run_on_all_ranks(runner: StepRunner, group: ProcessGroup, step: StepInput) -> StepOutput:
    """Runs the step on rank 0, the caller, and on all ranks in `serve_steps`. Returns its output.

    Raises RankDiedError for any failure: a failure within a step leaves the ranks at different collectives, so that no
    later step can be trusted.
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
    """Runs every step that rank 0 sends, until rank 0 sends a stop. All ranks but rank 0 call this.

    Raises RankDiedError if another rank has died, and all errors of a step. The process should then exit.
    """
    while (step := unpack(group.receive())) is not None:
        runner.run_step(step)


def stop_ranks(group: ProcessGroup) -> None:
    """Makes the other ranks return from `serve_steps`. Rank 0 calls this."""
    group.send(pack(None))
