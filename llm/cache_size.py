"""Measures how much memory of a GPU is left for the KV cache, by running the most demanding step before the cache
exists."""

from collections.abc import Callable

import torch

from llm.step_input import StepInput


def worst_step(
    *,
    num_tokens: int,
    num_positions: int,
    num_logits: int,
    num_rope_axes: int,
    block_size: int,
    is_span: bool,
    embedding_size: int | None = None,
) -> StepInput:
    """Returns a step that computes the last `num_tokens` tokens of a prompt of `num_positions`.

    It computes `num_logits` rows of logits, one for each sequence that can run at once. `is_span`: the tokens attend to
    each other. `embedding_size`: all tokens are of items with embeddings of this size; None: no token is. The whole
    step reads and writes block 0, so that a cache of one block is enough.
    """
    num_tokens = min(num_tokens, num_positions)
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    return StepInput(
        token_ids=zeros,
        positions=torch.arange(num_positions - num_tokens, num_positions).expand(num_rope_axes, -1),
        slot_mapping=zeros,
        logits_rows=torch.zeros(num_logits, dtype=torch.int64),
        embed_rows=zeros[:0] if embedding_size is None else torch.arange(num_tokens),
        embeds=[] if embedding_size is None else [torch.zeros(num_tokens, embedding_size)],
        block_tables=[[0] * -(-num_positions // block_size)],
        query_lengths=[num_tokens],
        context_lengths=[num_positions],
        span_members=[(0, 0, at) for at in range(num_positions - num_tokens, num_positions)] if is_span else [],
        scored=[],
    )


def bytes_left_for_cache(
    run_worst_step: Callable[[], None], device: torch.device, memory_fraction: float, reserved_bytes: int = 0
) -> int:
    """Returns how many bytes are left of `memory_fraction` of a GPU's memory.

    From that share it subtracts the memory of other processes, the peak of weights and step together, and
    `reserved_bytes` for the other work of this process. Raises ValueError when nothing is left.
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
