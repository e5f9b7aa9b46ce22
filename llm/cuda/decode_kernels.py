"""Triton kernels for the attention of one new token a sequence. They read the paged KV cache once and in place.

Each context is divided into splits, so that a few long sequences keep a whole GPU busy. A second kernel merges them.

Triton specializes a kernel on constants, types, integers equal to 1, and integers and addresses that are multiples of
16. Arguments that vary between steps are excluded. One layer then has three kernels: for whole contexts, for splits,
and for merging. `first_steps` compiles them at start-up."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# The most positions and bytes of an iteration of the inner loop. Shared memory holds several iterations at a time.
_TILE_POSITIONS = 64
_TILE_BYTES = 48 * 2**10
_LEAST_DOT = 16  # the smallest size of an operand's dimension in a product on tensor cores
_MAX_SPLITS = 64  # the merge kernel reads all splits of a head at once
# Arguments that vary between steps. The tables and lengths of a CUDA graph are columns of its inputs, at any address.
_VARYING_NUMBERS = ["table_stride", "length_stride", "num_splits"]
_VARYING_PLACES = ["block_tables", "lengths"]
_ALIGNMENT = 16  # bytes; Triton treats multiples as aligned addresses


@dataclass(frozen=True, slots=True)
class PagedContexts:
    """The contexts of decoding sequences, on the device: `block_tables` (num_sequences, max_blocks) and `lengths`
    (num_sequences,), int32. Table entries after a sequence's last block are not read."""

    block_tables: torch.Tensor
    lengths: torch.Tensor


def count_splits(num_programs: int, max_length: int, num_processors: int) -> int:
    """Returns the number of splits of each context: enough for four programs on each of the GPU's multiprocessors, but
    a split of the longest context has at least 4 * `_TILE_POSITIONS` positions."""
    wanted = -(-4 * num_processors // num_programs)
    return max(1, min(wanted, max_length // (4 * _TILE_POSITIONS), _MAX_SPLITS))


def paged_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    contexts: PagedContexts,
    output: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
    window: int | None,
    num_splits: int,
) -> None:
    """Attends with `queries` (num_sequences, heads, key_dim) and fills `output` (num_sequences, heads, value_dim). Both
    must be contiguous. `keys` and `values`: the cache, (num_blocks, block_size, kv_heads, dim), of any dtype. Each
    query belongs to the last position of its context. It sees the last `window` positions, or all for None."""
    (num_sequences, heads, key_dim), value_dim = queries.shape, values.shape[-1]
    kv_heads = keys.shape[2]
    assert queries.is_contiguous()
    assert output.is_contiguous()
    assert heads % kv_heads == 0
    queries = _aligned(queries)
    is_split = num_splits > 1
    # With a single split the kernel writes the final result to `output`.
    partials, sums = output, output
    if is_split:
        shape = (num_sequences, heads, num_splits)
        partials = torch.empty(*shape, value_dim, dtype=torch.float32, device=queries.device)
        sums = torch.empty(shape, dtype=torch.float32, device=queries.device)
    tile_keys, tile_values = _padded(key_dim), _padded(value_dim)
    position_bytes = (tile_keys + tile_values) * max(queries.itemsize, keys.itemsize)
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]
        _attend_split[(num_sequences, kv_heads, num_splits)](
            queries,
            keys,
            values,
            contexts.block_tables,
            contexts.lengths,
            partials,
            sums,
            contexts.block_tables.stride(0),
            contexts.lengths.stride(0),
            scaling,
            0.0 if softcap is None else softcap,
            window or 0,
            num_splits,
            kv_heads=kv_heads,
            groups=heads // kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            block_size=keys.shape[1],
            has_softcap=softcap is not None,
            has_window=window is not None,
            is_split=is_split,
            tile_groups=_padded(heads // kv_heads),
            tile_keys=tile_keys,
            tile_values=tile_values,
            tile_positions=_tile_positions(position_bytes),
        )
        if is_split:
            _merge_splits[(num_sequences, heads)](
                partials,
                sums,
                output,
                num_splits,
                value_dim=value_dim,
                tile_splits=_MAX_SPLITS,
                tile_values=triton.next_power_of_2(value_dim),
            )


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, copied if its address is not aligned: a single row of queries can be, for some head sizes."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def _padded(size: int) -> int:
    padded: int = max(_LEAST_DOT, triton.next_power_of_2(size))
    return padded


def _tile_positions(position_bytes: int) -> int:
    """Returns the positions that one iteration of the inner loop reads: a power of two, as Triton requires."""
    tile = _TILE_POSITIONS
    while tile > _LEAST_DOT and tile * position_bytes > _TILE_BYTES:
        tile //= 2
    return tile


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=_VARYING_NUMBERS, do_not_specialize_on_alignment=_VARYING_PLACES
)
def _attend_split(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    block_tables,
    lengths,
    partials,
    sums,
    table_stride,
    length_stride,
    scaling,
    softcap,
    window,
    num_splits,
    kv_heads: tl.constexpr,
    groups: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    block_size: tl.constexpr,
    has_softcap: tl.constexpr,
    has_window: tl.constexpr,
    is_split: tl.constexpr,
    tile_groups: tl.constexpr,
    tile_keys: tl.constexpr,
    tile_values: tl.constexpr,
    tile_positions: tl.constexpr,
):
    """Attends over one split of one sequence's context, for all query heads of one key head.

    Writes `partials` (sequences, heads, splits, value_dim) and, with several splits, the logarithm of each split's sum
    of weights to `sums` (sequences, heads, splits)."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    group_range = tl.arange(0, tile_groups)
    key_range = tl.arange(0, tile_keys)
    value_range = tl.arange(0, tile_values)
    tile_range = tl.arange(0, tile_positions)
    # The rows of queries and output: int64, because offsets computed from them may exceed 2**31.
    heads = (sequence * kv_heads + kv_head).to(tl.int64) * groups + group_range
    is_head = group_range < groups

    query_places = queries + heads[:, None] * key_dim + key_range[None, :]
    query = tl.load(query_places, mask=is_head[:, None] & (key_range < key_dim)[None, :], other=0.0)

    length = tl.load(lengths + sequence * length_stride)
    begin = 0
    if has_window:
        begin = tl.maximum(length - window, 0)
    split_tiles = tl.cdiv(tl.cdiv(length - begin, num_splits), tile_positions)
    first = begin + split * split_tiles * tile_positions
    last = tl.minimum(first + split_tiles * tile_positions, length)

    highest = tl.full([tile_groups], float("-inf"), tl.float32)
    total = tl.zeros([tile_groups], tl.float32)
    result = tl.zeros([tile_groups, tile_values], tl.float32)
    for start in range(first, last, tile_positions):
        positions = start + tile_range
        is_seen = positions < last
        blocks = tl.load(
            block_tables + sequence.to(tl.int64) * table_stride + positions // block_size, mask=is_seen, other=0
        )
        rows = (blocks.to(tl.int64) * block_size + positions % block_size) * kv_heads + kv_head

        key_places = keys + rows[None, :] * key_dim + key_range[:, None]
        key = tl.load(key_places, mask=is_seen[None, :] & (key_range < key_dim)[:, None], other=0.0)
        scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * scaling
        if has_softcap:
            # tanh by exp, because Triton lacks tanh
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
        scores = tl.where(is_seen[None, :], scores, float("-inf"))

        # Each tile of a split holds at least one seen position, so `new_highest` is finite.
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new_highest[:, None])
        shrink = tl.exp(highest - new_highest)
        highest = new_highest

        value_places = values + rows[:, None] * value_dim + value_range[None, :]
        value = tl.load(value_places, mask=is_seen[:, None] & (value_range < value_dim)[None, :], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(
            weights.to(query.dtype), value.to(query.dtype), input_precision="ieee"
        )

    # An empty split gets the logarithm -inf and so the weight exp(-inf) = 0.
    is_empty = last <= first
    result = result / tl.where(is_empty, 1.0, total)[:, None]
    places = heads * num_splits + split
    partial_places = partials + places[:, None] * value_dim + value_range[None, :]
    is_value = is_head[:, None] & (value_range < value_dim)[None, :]
    tl.store(partial_places, result.to(partials.dtype.element_ty), mask=is_value)
    if is_split:
        tl.store(sums + places, highest + tl.log(tl.where(is_empty, 1.0, total)), mask=is_head)


@triton.jit(do_not_specialize=_VARYING_NUMBERS)  # type: ignore[untyped-decorator]
def _merge_splits(  # type: ignore[no-untyped-def]
    partials,
    sums,
    output,
    num_splits,
    value_dim: tl.constexpr,
    tile_splits: tl.constexpr,
    tile_values: tl.constexpr,
):
    """Writes to `output` the mean of a head's partials, each weighted with its split's sum of weights."""
    head = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    split_range = tl.arange(0, tile_splits)
    value_range = tl.arange(0, tile_values)
    is_split = split_range < num_splits
    is_value = value_range < value_dim

    own_sums = tl.load(sums + head * num_splits + split_range, mask=is_split, other=float("-inf"))
    weights = tl.exp(own_sums - tl.max(own_sums, 0))
    places = partials + (head * num_splits + split_range)[:, None] * value_dim + value_range[None, :]
    parts = tl.load(places, mask=is_split[:, None] & is_value[None, :], other=0.0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(output + head * value_dim + value_range, merged.to(output.dtype.element_ty), mask=is_value)
