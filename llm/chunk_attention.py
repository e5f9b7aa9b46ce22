"""Attention of a prefill chunk on any device, over keys and values gathered into one tensor each. Masks are causal
within the layer's sliding window, and bidirectional within a span."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from raylens.llm.attention import AttentionCall
from raylens.llm.host_values import send
from raylens.llm.prompt_layout import BidirectionalSpan
from raylens.llm.step_input import StepInput


def capped(scores: torch.Tensor, scaling: float, softcap: float) -> torch.Tensor:
    """Returns the scores in float32, scaled and then capped."""
    return softcap * torch.tanh(scores.float() * scaling / softcap)


def attend_chunk(
    call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attends with `queries` (num_queries, heads, key_dim) over `keys` and `values` (kv_heads, num_positions, dim), all
    of one dtype. Returns (num_queries, heads, value_dim). `mask`: (num_queries, num_positions) or (heads, num_queries,
    num_positions): bool, True where a query sees a position, or, without a soft cap, what is added to the scores. None:
    causal; the queries belong to the last positions."""
    queries = queries.transpose(0, 1)
    if call.softcap is None:
        is_square = queries.shape[1] == keys.shape[1]
        # The fastest kernels accept no mask tensor.
        bias = causal_lower_right(queries.shape[1], keys.shape[1]) if mask is None and not is_square else mask
        q, k, v = (tensor.unsqueeze(0) for tensor in (queries, keys, values))
        output = scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=call.scaling, enable_gqa=True
        )
        return output[0].transpose(0, 1)
    # PyTorch's own attention function has no soft cap.
    groups = queries.reshape(len(keys), -1, *queries.shape[1:])
    scores = (groups.flatten(1, 2) @ keys.transpose(1, 2)).view(*groups.shape[:3], -1)
    if mask is None:
        size = scores.shape[-2:]
        mask = torch.ones(size, dtype=torch.bool, device=scores.device).tril(size[1] - size[0])
    weights = capped(scores, call.scaling, call.softcap).masked_fill_(~mask, -torch.inf).softmax(dim=-1)
    output = weights.to(values.dtype).flatten(1, 2) @ values
    return output.view(*groups.shape[:3], -1).flatten(0, 1).transpose(0, 1)


def chunk_masks(
    step: StepInput,
    chunk: int,
    windows: Iterable[int | None],
    *,
    windows_cut_spans: bool,
    spans_need_window: bool,
    device: torch.device,
) -> dict[int | None, torch.Tensor | None]:
    """Returns for each window the `prefill_mask` of a chunk of the step, or None for a plain causal mask.

    `spans_need_window`: whether the mask without a window has no spans."""
    all_spans, end = step.spans_of(chunk), step.context_lengths[chunk]
    start = end - step.query_lengths[chunk]
    masks: dict[int | None, torch.Tensor | None] = {}
    for window in windows:
        spans = [] if spans_need_window and window is None else all_spans
        masks[window] = None
        if spans or (window is not None and window < end):
            masks[window] = prefill_mask(start, end, spans, window, windows_cut_spans=windows_cut_spans, device=device)
    return masks


def prefill_mask(
    start: int,
    end: int,
    spans: Sequence[BidirectionalSpan],
    window: int | None,
    *,
    windows_cut_spans: bool,
    device: torch.device,
) -> torch.Tensor:
    """Returns the mask of the positions [start, end) of a sequence: bool, (end - start, end), True where seen.
    `windows_cut_spans`: whether the sliding window also applies within a span."""
    mask = torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
    in_window = mask if window is None else torch.ones_like(mask).triu(start - window + 1)
    if not windows_cut_spans:
        mask &= in_window
    for span in spans:
        if start < span.end and span.start < end:
            # The span may begin before the chunk, in cached blocks of an equal span that was computed whole.
            assert span.end <= end, "a bidirectional span was split"
            members = np.array(span.members)
            # Boolean indexing on the device and assigning a Python number would both synchronize.
            rows = send(members[members >= start] - start, device)
            mask.index_put_((rows[:, None], send(members, device)), mask.new_ones(()))
    if windows_cut_spans and window is not None:
        mask &= in_window
    return mask
