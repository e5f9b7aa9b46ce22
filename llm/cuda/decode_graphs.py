"""Runs decode steps as CUDA graphs: kernels are recorded once, then launched by a single call.

Each of some batch sizes has a graph; all share one input buffer. A step takes the smallest graph that fits and pads the
remaining rows."""

from collections.abc import Callable

import numpy as np
import torch

from raylens.llm.attention import AttentionBackend
from raylens.llm.cuda.attention import CudaAttention
from raylens.llm.cuda.decode_kernels import PagedContexts
from raylens.llm.host_values import HostValues
from raylens.llm.step_input import StepInput

Outputs = tuple[torch.Tensor, torch.Tensor]
Forward = Callable[[StepInput, AttentionBackend], Outputs]
Replay = Callable[[], Outputs]
"""Runs the recorded computation on the inputs' current content. It overwrites the previous outputs."""

# The first columns of the inputs. Rotary positions and the block table follow.
_TOKEN, _SLOT, _LENGTH, _NUM_FIXED = range(4)
_STEP_BETWEEN_SIZES = 8


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Returns the batch sizes to record: 1, 2, 4, the multiples of 8, and `max_num_seqs`."""
    sizes = [1, 2, 4, *range(_STEP_BETWEEN_SIZES, max_num_seqs, _STEP_BETWEEN_SIZES)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Runs `forward` for steps in which all sequences decode. `capture` records a function and returns its replay, see
    `CudaCapture`. `max_length` bounds the positions of a sequence."""

    def __init__(
        self,
        forward: Forward,
        attention: CudaAttention,
        *,
        max_num_seqs: int,
        max_length: int,
        num_rope_axes: int,
        device: torch.device,
        capture: Callable[[Replay], Replay],
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._max_length = max_length
        self._table_start = _NUM_FIXED + num_rope_axes
        num_columns = self._table_start + -(-max_length // attention.block_size)
        # One row a sequence. The host assembles the inputs here; the device never reads this memory.
        self._rows = np.zeros((max_num_seqs, num_columns), dtype=np.int32)
        self._pad(slice(None))
        self._inputs = torch.from_numpy(self._rows.copy()).to(device)
        self._logits_rows = torch.arange(max_num_seqs, device=device)
        # The largest graph is recorded first, so that the smaller ones reuse its memory.
        self._replays = {size: capture(self._computation(size)) for size in reversed(batch_sizes(max_num_seqs))}

    def fits(self, step: StepInput) -> bool:
        """Returns whether the graphs can run the step: one decoded token for each sequence, no adapters, and no context
        longer than `max_length`."""
        num_chunks = len(step.query_lengths)
        return (
            step.num_decodes == num_chunks == len(step.logits_rows) <= len(self._rows)
            and not step.reads_hidden
            and not len(step.embed_rows)
            and step.row_slots is None
            and max(step.context_lengths) <= self._max_length
        )

    def run(self, step: StepInput) -> Outputs:
        """Returns the hidden states and logits of a step that fits, with tensors on the CPU. The next run overwrites
        both.

        The host does not wait for the previous step: each run uploads its rows from pinned memory of its own. The
        device overwrites the graphs' inputs and outputs in stream order, after all readers."""
        num_seqs = len(step.query_lengths)
        size = min(size for size in self._replays if size >= num_seqs)
        own = self._rows[:num_seqs]
        own[:, _TOKEN] = step.token_ids
        own[:, _SLOT] = step.slot_mapping
        own[:, _LENGTH] = step.context_lengths
        own[:, _NUM_FIXED : self._table_start] = step.positions.T
        for row, blocks in zip(own, step.block_tables, strict=True):
            row[self._table_start : self._table_start + len(blocks)] = blocks
        self._pad(slice(num_seqs, size))
        values = HostValues(self._inputs.device)
        rows = values.add(self._rows[:size])
        feed = None if step.fed is None else step.fed.plan(values)
        values.upload()
        self._inputs[:size].copy_(values[rows])
        if feed is not None:
            feed(self._inputs[:size, _TOKEN])
        hidden, logits = self._replays[size]()
        return hidden[:num_seqs], logits[:num_seqs]

    def _pad(self, rows: slice) -> None:
        """Turns each of these host rows into a sequence of one token in the padding block."""
        padding = self._rows[rows]
        padding[:, : self._table_start] = 0
        padding[:, _SLOT] = self._attention.padding_block * self._attention.block_size
        padding[:, _LENGTH] = 1
        padding[:, self._table_start] = self._attention.padding_block

    def _computation(self, size: int) -> Replay:
        inputs = self._inputs[:size]
        contexts = PagedContexts(inputs[:, self._table_start :], inputs[:, _LENGTH])

        def compute() -> Outputs:
            wide = inputs[:, : self._table_start].long()
            step = StepInput(
                token_ids=wide[:, _TOKEN],
                # Even a single row needs the strides that the layers were compiled for.
                positions=wide[:, _NUM_FIXED:].T.clone(memory_format=torch.contiguous_format),
                slot_mapping=wide[:, _SLOT].contiguous(),
                logits_rows=self._logits_rows[:size],
                embed_rows=self._logits_rows[:0],
            )
            return self._forward(step, self._attention.prepare_decodes(step.slot_mapping, contexts, self._max_length))

        return compute
