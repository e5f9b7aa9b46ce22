"""Chooses the next token of each row of logits in one call, see `csrc/sampler.h`."""

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.structures import address_of, addresses, floats, integers
from raylens.cpu_kernels.threads import num_threads


class _Tokens(ctypes.Structure):
    _fields_ = addresses("ids") + integers("count")


class RowSettings(ctypes.Structure):
    """The settings for choosing a row's token. Unset numbers are 0, except for `top_p` and `repetition_penalty`, which
    are 1.

    `edits` not 0: `mask`, `allowed`, `bad`, `early`, `biased` and the penalties of `seen` edit the logits, in this
    order, see `logits_processors.plan_edits`. `draws` not 0: the token is drawn. The logits are divided by
    `temperature`, then `min_p`, `top_k` and `top_p` cut tokens, see `truncation.plan_truncation`, and `uniform`, in
    [0, 1), selects one of the others."""

    _fields_ = [
        *((name, _Tokens) for name in ("allowed", "bad", "early", "biased", "seen")),
        *addresses("mask", "biases", "output_counts"),
        *floats("repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "min_p"),
        *integers("top_k", "edits", "draws"),
        *((name, ctypes.c_double) for name in ("top_p", "uniform")),
    ]

    def set_tokens(self, name: str, token_ids: npt.NDArray[np.int64] | None) -> None:
        """Sets `allowed`, `bad`, `early`, `biased` or `seen`: distinct token ids within the vocabulary, or None. The
        array must live until the end of the next `choose_tokens`."""
        setattr(self, name, (None, 0) if token_ids is None else (address_of(token_ids), len(token_ids)))


def choose_tokens(library: KernelLibrary, logits: torch.Tensor, rows: Sequence[RowSettings | None]) -> list[int]:
    """Returns the next token of each row of `logits`, (len(rows), vocab), float32, contiguous. A row of None takes its
    likeliest token. Returns -1 for a row whose highest logit is NaN or infinite, before or after the edits.

    Overwrites `logits`."""
    count, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and count == len(rows)  # noqa: PT018
    settings = array("Q", [0 if row is None else ctypes.addressof(row) for row in rows])
    token_ids = array("q", bytes(8 * count))
    library.choose(logits.data_ptr(), vocab, count, address_of(settings), address_of(token_ids), num_threads())
    return token_ids.tolist()
