"""Masks of which positions a position sees: those up to itself within its layer's window, and those of its span."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from raylens.llm.host_values import send
from raylens.llm.prompt_layout import BidirectionalSpan
from raylens.llm.step_input import StepInput


def chunk_masks(
    step: StepInput, chunk: int, windows: Iterable[int | None], *, windows_cut_spans: bool, device: torch.device
) -> dict[int | None, torch.Tensor | None]:
    """Returns for each window the `prefill_mask` of a chunk of the step, or None where each position sees all positions
    up to itself."""
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
    """Returns which positions the positions [start, end) of a sequence see: bool, (end - start, end).

    `windows_cut_spans`: whether a member of a span sees only those other members that do not lie before its window.
    """
    mask = torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
    in_window = mask if window is None else torch.ones_like(mask).triu(start - window + 1)
    if not windows_cut_spans:
        mask &= in_window
    for span in spans:
        if start < span.end and span.start < end:
            # The span may begin before the chunk, in cached blocks that were computed with the whole of an equal span.
            assert span.end <= end, "a bidirectional span was split"
            members = np.array(span.members)
            # The host would wait for the device to count the rows there, and to assign a number of its own.
            rows = send(members[members >= start] - start, device)
            mask.index_put_((rows[:, None], send(members, device)), mask.new_ones(()))
    if windows_cut_spans and window is not None:
        mask &= in_window
    return mask
