"""Runs the same steps on all ranks: rank 0 sends each step, and the other ranks receive and run it.

A message has no adapters, because a model on several ranks serves none."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
import torch

from raylens.llm.ranks.parallel import ProcessGroup, RankDiedError
from raylens.llm.step_input import StepInput, StepOutput

RunStep = Callable[[StepInput], StepOutput]
"""Computes a step with this rank's share of the model. All ranks get the same output."""


def run_on_all_ranks(run_step: RunStep, group: ProcessGroup, step: StepInput) -> StepOutput:
    """Runs the step on rank 0, the caller, and on all ranks in `serve_steps`. Raises RankDiedError for any failure: it
    leaves the ranks at different collectives, so that no later step can be trusted."""
    group.send(pack(step))
    try:
        return run_step(step)
    except RankDiedError:
        raise
    except Exception as error:
        raise RankDiedError(f"rank 0 failed within a step: {error}") from error


@torch.inference_mode()
def serve_steps(run_step: RunStep, group: ProcessGroup) -> None:
    """Runs every step that rank 0 sends, until it sends a stop. All ranks but rank 0 call this. Raises RankDiedError if
    another rank has died, and all errors of a step. The process should then exit."""
    while (step := unpack(group.receive())) is not None:
        run_step(step)


def stop_ranks(group: ProcessGroup) -> None:
    """Makes the other ranks return from `serve_steps`, by an empty message. Rank 0 calls this."""
    group.send(torch.empty(0, dtype=torch.uint8))


def pack(step: StepInput) -> torch.Tensor:
    """Returns the message of a step, uint8."""
    assert step.fed is None, "the ranks get all tokens from rank 0's host"
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    return torch.frombuffer(bytearray(msgpack.packb(values, default=_tensor_to_map)), dtype=torch.uint8)


def unpack(message: torch.Tensor) -> StepInput | None:
    """Returns the step of a message of `pack`, or None for stop."""
    if not message.numel():
        return None
    values = msgpack.unpackb(message.numpy(), object_hook=_map_to_tensor)
    for name in ("span_members", "scored", "pooled"):
        values[name] = list(map(tuple, values[name]))
    return StepInput(**values)


def _tensor_to_map(tensor: torch.Tensor) -> dict[str, Any]:
    # Cloned, because a single-element tensor counts as contiguous even with a stride that a view as bytes rejects.
    data = tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().data
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data}


def _map_to_tensor(values: dict[str, Any]) -> Any:
    if "dtype" not in values:
        return values
    data = np.frombuffer(bytearray(values["data"]), np.uint8)
    return torch.from_numpy(data).view(getattr(torch, values["dtype"])).view(values["shape"])
