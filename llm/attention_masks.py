"""Attention masks: causal within the layer's sliding window, bidirectional within a span."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from raylens.llm.host_values import send
from raylens.llm.prompt_layout import BidirectionalSpan
from raylens.llm.step_input import StepInput


def chunk_masks(
    step: StepInput, chunk: int, windows: Iterable[int | None], *, windows_cut_spans: bool, device: torch.device
) -> dict[int | None, torch.Tensor | None]:
    """Returns for each window the `prefill_mask` of a chunk of the step, or None for a plain causal mask."""
    spans, end = step.spans_of(chunk), step.context_lengths[chunk]
    start = end - step.query_lengths[chunk]
    return {
        window: None
        if not spans and (window is None or window >= end)
        else prefill_mask(start, end, spans, window, windows_cut_spans=windows_cut_spans, device=device)
        for window in windows
    }


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

    `windows_cut_spans`: whether the sliding window also applies within a span.
    """
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
