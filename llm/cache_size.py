"""How much memory of a GPU is left for the KV cache: the most demanding step is run before there is one."""

from collections.abc import Callable

import torch

from llm.step_input import StepInput


def worst_step(
    *, num_tokens: int, num_positions: int, num_logits: int, num_rope_axes: int, block_size: int, is_span: bool
) -> StepInput:
    """The last `num_tokens` of a prompt of `num_positions`, with logits for as many sequences as can run at once.
    `is_span`: they attend to each other.

    All of it reads and writes block 0, so that a cache of one block will do.
    """
    num_tokens = min(num_tokens, num_positions)
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    return StepInput(
        token_ids=zeros,
        positions=torch.arange(num_positions - num_tokens, num_positions).expand(num_rope_axes, -1),
        slot_mapping=zeros,
        logits_rows=torch.zeros(num_logits, dtype=torch.int64),
        embed_rows=zeros[:0],
        embeds=torch.empty(0, 0),
        block_tables=[[0] * -(-num_positions // block_size)],
        query_lengths=[num_tokens],
        context_lengths=[num_positions],
        span_members=[(0, 0, at) for at in range(num_positions - num_tokens, num_positions)] if is_span else [],
        scored=[],
    )


def bytes_left_for_cache(
    run_worst_step: Callable[[], None], device: torch.device, memory_fraction: float, reserved_bytes: int = 0
) -> int:
    """Bytes of `memory_fraction` of a GPU's memory that neither other processes nor weights nor the step take, nor
    those that are reserved for what this process does besides.

    Raises ValueError when there are none.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_worst_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    left = int(total * memory_fraction) - elsewhere - peak - reserved_bytes
    if left <= 0:
        raise ValueError(
            f"memory_fraction ({memory_fraction}) of {total} bytes leaves nothing for the KV cache: weights and the"
            f" largest step take {peak}, others {elsewhere}, reserved are {reserved_bytes}"
        )
    return left
