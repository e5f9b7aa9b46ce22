"""Gives a runner without a GPU what one with a GPU has: its attention, and decode steps that are recorded."""

from dataclasses import dataclass, field

import torch

from raylens.llm.cuda.attention import CudaAttention
from raylens.llm.cuda.decode_graphs import DecodeGraphs, Outputs, Replay
from raylens.llm.model_runner import ModelRunner
from tests.llm.attention_reference import BLOCK_SIZE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_NUM_SEQS, MAX_LENGTH = 6, 200


@dataclass
class Recorder:
    """Stands in for CUDA: runs what was recorded again, notes how large it was and reuses its outputs' memory."""

    sizes: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)

    def capture(self, function: Replay) -> Replay:
        outputs = function()
        size = len(outputs[0])
        self.sizes.append(size)

        def replay() -> Outputs:
            self.replayed.append(size)
            for kept, new in zip(outputs, function(), strict=True):
                kept.copy_(new)
            return outputs

        return replay


def with_graphs(runner: ModelRunner, recorder: Recorder) -> CudaAttention:
    """Gives a runner on the CPU what one on a GPU has; on a GPU, the recorder in place of CUDA's."""
    runner._attention = attention = make_attention(runner, runner.num_blocks)
    runner._graphs = DecodeGraphs(
        runner.forward,
        attention,
        max_num_seqs=MAX_NUM_SEQS,
        max_length=MAX_LENGTH,
        num_rope_axes=runner._family.num_rope_axes,
        device=DEVICE,
        capture=recorder.capture,
    )
    return attention


def make_attention(runner: ModelRunner, num_blocks: int) -> CudaAttention:
    return CudaAttention(
        runner._layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        windows_cut_spans=runner._family.windows_cut_spans,
        max_positions=runner.context_length,
        device=DEVICE,
    )
