"""Masks of any chunk of any prompt are those of the definition, position by position."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raylens.llm.chunk_attention import chunk_masks, prefill_mask
from raylens.llm.prompt_layout import BidirectionalSpan, PromptLayout

CPU = torch.device("cpu")


@st.composite
def chunked_spans(draw: st.DrawFn) -> tuple[list[BidirectionalSpan], int, int]:
    """Spans apart from each other, and a chunk [start, end) whose end splits none: its beginning may be cached."""
    bounds = sorted(draw(st.sets(st.integers(0, 20), max_size=6)))
    spans = []
    for first, end in zip(bounds[::2], bounds[1::2], strict=False):
        inner = draw(st.sets(st.integers(first, end - 1)))
        spans.append(BidirectionalSpan.of(sorted(inner | {first, end - 1})))
    cuts = [cut for cut in range(25) if not any(span.start < cut < span.end for span in spans)]
    end = draw(st.sampled_from(cuts[1:]))
    start = draw(st.integers(0, end - 1))
    return spans, start, end


def sees(query: int, key: int, spans: list[BidirectionalSpan], window: int | None, windows_cut_spans: bool) -> bool:
    is_near = window is None or key > query - window
    is_of_one_span = any({query, key} <= set(span.members) for span in spans)
    if windows_cut_spans:
        return (key <= query or is_of_one_span) and is_near
    return (key <= query and is_near) or is_of_one_span


@given(chunked_spans(), st.none() | st.integers(1, 25), st.booleans())
def test_prefill_masks_are_those_of_the_definition(
    chunk: tuple[list[BidirectionalSpan], int, int], window: int | None, windows_cut_spans: bool
) -> None:
    spans, start, end = chunk
    mask = prefill_mask(start, end, spans, window, windows_cut_spans=windows_cut_spans, device=CPU)
    expected = [[sees(q, k, spans, window, windows_cut_spans) for k in range(end)] for q in range(start, end)]
    assert mask.tolist() == expected


def test_layers_without_a_window_may_be_causal_within_spans() -> None:
    step: Any = SimpleNamespace(
        spans_of=lambda chunk: [BidirectionalSpan.of([1, 2, 3])], context_lengths=[6], query_lengths=[6]
    )
    make = partial(chunk_masks, step, 0, [None, 4], windows_cut_spans=True, device=CPU)
    everywhere, windows_only = make(spans_need_window=False), make(spans_need_window=True)
    assert everywhere[None] is not None
    assert windows_only[None] is None, "plainly causal"
    in_window, expected = windows_only[4], everywhere[4]
    assert in_window is not None
    assert expected is not None
    assert in_window.equal(expected)


def test_a_split_span_is_an_error() -> None:
    with pytest.raises(AssertionError, match="split"):
        prefill_mask(0, 3, [BidirectionalSpan.of([2, 4])], None, windows_cut_spans=True, device=CPU)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_positions_do_not_depend_on_the_chunks(first: int, second: int, third: int) -> None:
    start, middle, end = sorted((first, second, third))
    prompt = np.random.default_rng(0).integers(100, size=(3, 6))
    for layout in (PromptLayout(), PromptLayout(rope_offsets=(1,)), PromptLayout(prompt, rope_offsets=(-2, 0, 5))):
        whole, *parts = (
            np.broadcast_to(layout.positions(*bounds), (3, bounds[1] - bounds[0]))
            for bounds in ((start, end), (start, middle), (middle, end))
        )
        assert np.array_equal(np.concatenate(parts, axis=1), whole)
    generated = PromptLayout(prompt, rope_offsets=(-2, 0, 5)).positions(6, 9)
    assert generated.tolist() == [[4, 5, 6], [6, 7, 8], [11, 12, 13]]
