"""The dtype and size of a GPU's KV cache. The largest possible step runs first, to measure the memory left for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from raylens.llm.config import EngineConfig
from raylens.llm.step_input import StepInput

_FLOAT8_CAPABILITY = (8, 9)
"""The least compute capability for which Triton supports float8_e4m3fn: Ada's."""
_REMEDY = "lower max_num_batched_tokens or max_num_seqs"


def check_cache_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError if the decode kernels cannot read a cache of `dtype` on the CUDA device."""
    capability = torch.cuda.get_device_capability(device)
    if dtype is torch.float8_e4m3fn and capability < _FLOAT8_CAPABILITY:
        raise ValueError(
            "kv_cache_dtype: float8_e4m3fn takes a GPU of compute capability 8.9 or higher, such as an L4 or an H100;"
            f" this one has {capability[0]}.{capability[1]}. Take auto"
        )


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

    `num_logits`: rows of logits, one for each sequence that can run at once. `is_span`: the tokens attend to each
    other. `embedding_size`: all tokens belong to items with embeddings of this size; None: to text. The step reads and
    writes block 0 only, so that a cache of one block is enough."""
    num_tokens = min(num_tokens, num_positions)
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    return StepInput(
        token_ids=zeros,
        positions=torch.arange(num_positions - num_tokens, num_positions).expand(num_rope_axes, -1),
        slot_mapping=zeros,
        logits_rows=torch.zeros(num_logits, dtype=torch.int64),
        embed_rows=torch.arange(num_tokens if embedding_size else 0),
        embeds=[torch.zeros(num_tokens, embedding_size)] if embedding_size else [],
        block_tables=[[0] * -(-num_positions // block_size)],
        query_lengths=[num_tokens],
        context_lengths=[num_positions],
        prompt_lengths=[num_positions],
        span_members=[(0, 0, at) for at in range(num_positions - num_tokens, num_positions)] if is_span else [],
    )


@contextmanager
def shortage_explained(device: torch.device, config: EngineConfig, num_tokens: int) -> Iterator[None]:
    """Turns an out-of-memory error of the largest step, of `num_tokens`, into a ValueError that names the settings."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        total, elsewhere = _memory(device)
        raise ValueError(
            f"the GPU's memory ({total} bytes) does not hold the largest step, {_named_step(config, num_tokens)}: it"
            f" needs more than the {total - elsewhere} bytes that others leave; {_REMEDY}"
        ) from error


def bytes_left_for_cache(
    run_worst_step: Callable[[], None],
    device: torch.device,
    config: EngineConfig,
    *,
    num_tokens: int,
    bytes_of_block: int,
) -> int:
    """Returns the bytes that the KV cache may take. Raises ValueError if less than a block is left.

    The engine may use `memory_fraction` of its share of the GPU's memory, and no more than other processes leave of
    `memory_fraction` of the whole memory. This function subtracts `reserved_bytes` and the peak of weights and a step
    of `num_tokens`."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_worst_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    total, elsewhere = _memory(device)
    allowed = int(total * config.memory_fraction)
    share = min(int(allowed * config.gpu_share), allowed - elsewhere)
    left = share - peak - config.reserved_bytes
    if left < bytes_of_block:
        own = "" if config.gpu_share == 1 else f" times this engine's share of the GPU ({config.gpu_share})"
        raise ValueError(
            f"memory_fraction ({config.memory_fraction}) of {total} bytes{own} has no room for the KV cache: a block"
            f" takes {bytes_of_block} bytes, and {left} are left. Weights and the largest step,"
            f" {_named_step(config, num_tokens)}, take {peak}, other processes {elsewhere}, reserved are"
            f" {config.reserved_bytes}; {_REMEDY}, or raise memory_fraction"
        )
    return left


def _memory(device: torch.device) -> tuple[int, int]:
    """Returns the GPU's memory and the part of it that other processes hold, in bytes."""
    free, total = torch.cuda.mem_get_info(device)
    return total, total - free - torch.cuda.memory_reserved(device)


def _named_step(config: EngineConfig, num_tokens: int) -> str:
    return (
        f"{num_tokens} tokens (max_num_batched_tokens is {config.max_num_batched_tokens}, max_num_seqs"
        f" {config.max_num_seqs})"
    )
