"""Runs the first steps of an engine on a GPU before any request. They compile all kernels, and raise at start-up any
error that would fail every request."""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from raylens.llm.ranks.parallel import RankDiedError
from raylens.llm.step_input import StepInput, StepOutput

_PROMPT = 2  # tokens of the shortest prefill chunk


def run_first_steps(
    run: Callable[[StepInput], StepOutput], *, block: int, block_size: int, num_rope_axes: int, max_length: int
) -> None:
    """Runs a prompt, then decode steps with a short and the longest context, beside a prompt and alone. Raises all
    errors of these steps, asynchronous errors of the GPU included.

    Beside a prompt no CUDA graph is replayed. A decoding sequence has the most splits with the longest context, and a
    single split with a short one. All steps read and write `block`, which belongs to no sequence."""
    short, long = min(_PROMPT, max_length), max_length
    for chunks in ([(short, short)], [(1, short), (short, short)], [(1, long), (short, short)], [(1, short)]):
        step = _step(chunks, block=block, block_size=block_size, num_rope_axes=num_rope_axes)
        run(step).logits.sum().item()  # waits for the GPU


def _step(chunks: Sequence[tuple[int, int]], *, block: int, block_size: int, num_rope_axes: int) -> StepInput:
    """`chunks`: the number of tokens of each, and of positions up to its end."""
    lengths, ends = [length for length, _ in chunks], [end for _, end in chunks]
    num_tokens = sum(lengths)
    return StepInput(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        # Zeros, because some rotary embeddings adapt to the longest context so far.
        positions=torch.zeros(num_rope_axes, num_tokens, dtype=torch.int64),
        slot_mapping=torch.full((num_tokens,), block * block_size),
        logits_rows=torch.tensor(lengths).cumsum(0) - 1,
        block_tables=[[block] * -(-end // block_size) for end in ends],
        query_lengths=lengths,
        context_lengths=ends,
        prompt_lengths=ends,
    )


@contextmanager
def missing_tools_named() -> Iterator[None]:
    """Turns an error into a RuntimeError that names the tools that Triton lacks on this machine, if any: Triton
    compiles some C with each kernel. Other errors pass unchanged."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError, RankDiedError):
        raise
    except Exception as error:
        if missing := missing_tools():
            raise RuntimeError(
                f"the engine cannot start on this GPU: Triton compiles kernels with {' and '.join(missing)}, which this"
                " machine lacks; on Debian and Ubuntu, install the packages gcc and python3-dev"
            ) from error
        raise


def missing_tools() -> list[str]:
    """Returns the names of the tools that Triton needs at run time and cannot find. Searches the same places."""
    own = os.environ.get("CC")
    has_compiler = any(map(shutil.which, [own] if own else ["gcc", "clang"]))
    scheme = sysconfig.get_default_scheme()
    # Debian's scheme names a folder under /usr/local, which does not hold the headers.
    headers = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    has_headers = Path(headers, "Python.h").is_file()
    found = {f"the C compiler {own}" if own else "a C compiler": has_compiler, "Python's headers": has_headers}
    return [name for name, is_there in found.items() if not is_there]
