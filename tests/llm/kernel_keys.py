"""What Triton compiles for an engine: the keys by which it tells kernels apart, which it computes from the arguments
without a GPU.

For a process of its own, because Triton either compiles or interprets in a whole process."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from raylens.llm.cache_size import worst_step
from raylens.llm.config import DtypeName, EngineConfig
from raylens.llm.cuda import decode_kernels
from raylens.llm.engine import LLMEngine
from raylens.llm.model_runner import ModelRunner
from raylens.llm.prompt_layout import PromptLayout
from raylens.llm.scheduler import ScheduledChunk
from raylens.llm.sequence import Sequence
from raylens.llm.step_input import StepInput
from tests.llm.attention_reference import BLOCK_SIZE
from tests.llm.graph_recorder import MAX_NUM_SEQS, Recorder, with_graphs

H100 = make_backend(GPUTarget("cuda", 90, 32))
PROCESSORS_OF_H100 = 132
# A split has 256 positions at least.
CONTEXTS = (2, 15, 16, 17, 255, 511, 512, 600, 777)


class Watched:
    """Takes the place of a kernel. Notes the key of each launch, and computes zeros."""

    def __init__(self, kernel: Any, keys: list[str]) -> None:
        self._name, self._keys = kernel.__name__, keys
        self._bind = create_function_from_signature(kernel.signature, kernel.params, H100)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        arguments, specialization, options = self._bind(*args, **kwargs)
        key = f"{self._name} {specialization} {options}"
        if key not in self._keys:
            self._keys.append(key)
        arguments.get("output", arguments["partials"]).zero_()


def steps(runner: ModelRunner) -> Iterator[StepInput]:
    """Of all numbers of sequences and several contexts, with a prompt in the same step and without one."""
    layout = PromptLayout(rope_offsets=(0,) * runner._family.num_rope_axes)
    for num_seqs, context, prompt in itertools.product(range(1, MAX_NUM_SEQS + 1), CONTEXTS, (0, 2, 33)):
        chunks = [ScheduledChunk(sequence(context - index % 2, 1, layout), 1) for index in range(num_seqs)]
        if prompt:
            chunks.append(ScheduledChunk(sequence(prompt, prompt, layout), prompt))
        yield runner._builder.build(chunks)
    yield worst_step(
        num_tokens=1, num_positions=99, num_logits=3, num_rope_axes=1, block_size=BLOCK_SIZE, is_span=False
    )


def sequence(length: int, num_new: int, layout: PromptLayout) -> Sequence:
    made = Sequence("a", [5] * length, length - (num_new == 1), [], length + 1, layout)
    made.num_computed_tokens = length - num_new
    made.block_table = list(range(-(-length // BLOCK_SIZE)))
    return made


@torch.inference_mode()
def print_keys(checkpoint: str, dtype: DtypeName) -> None:
    """Prints two lists in JSON: the keys of an engine's start, and those that other steps add."""
    keys: list[str] = []
    for name in ("_attend_split", "_merge_splits"):
        setattr(decode_kernels, name, Watched(getattr(decode_kernels, name), keys))
    config = EngineConfig(
        checkpoint, dtype=dtype, kv_cache_bytes=2**23, block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS
    )
    engine = LLMEngine(config)
    runner = engine._runner
    with_graphs(engine._runner, Recorder())._num_processors = PROCESSORS_OF_H100
    runner._run_first_steps()
    at_start = list(keys)
    for step in steps(runner):
        runner.run_step(step)
    print(json.dumps([at_start, keys[len(at_start) :]]))
