"""Chooses the next token of each row of logits in one call, see `csrc/sampler.h`."""

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from raylens.cpu_kernels.library import KernelLibrary
from raylens.cpu_kernels.threads import num_threads


class _Tokens(ctypes.Structure):
    _fields_ = [("ids", ctypes.c_void_p), ("count", ctypes.c_int64)]


class RowSettings(ctypes.Structure):
    """The settings for choosing a row's token. Unset numbers are 0, except for `top_p` and `repetition_penalty`, which
    are 1.

    `edits` not 0: `mask`, `allowed`, `bad`, `early`, `biased` and the penalties of `seen` edit the logits, in this
    order, see `logits_processors.plan_edits`. `draws` not 0: the token is drawn. The logits are divided by
    `temperature`, then `min_p`, `top_k` and `top_p` cut tokens, see `truncation.plan_truncation`, and `uniform`, in
    [0, 1), selects one of the others."""

    _fields_ = [
        ("mask", ctypes.c_void_p),
        ("allowed", _Tokens),
        ("bad", _Tokens),
        ("early", _Tokens),
        ("biased", _Tokens),
        ("biases", ctypes.c_void_p),
        ("seen", _Tokens),
        ("output_counts", ctypes.c_void_p),
        *(
            (name, ctypes.c_float)
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "min_p")
        ),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("uniform", ctypes.c_double),
        ("edits", ctypes.c_int64),
        ("draws", ctypes.c_int64),
    ]

    def set_tokens(self, name: str, token_ids: npt.NDArray[np.int64]) -> None:
        """Sets `allowed`, `bad`, `early`, `biased` or `seen`: distinct token ids within the vocabulary. The array must
        live until the end of the next `choose_tokens`."""
        tokens: _Tokens = getattr(self, name)
        tokens.ids, tokens.count = address(token_ids), len(token_ids)


def address(numbers: npt.NDArray[np.generic]) -> int:
    """Returns the address of a contiguous array."""
    found: int = numbers.__array_interface__["data"][0]
    return found


def choose_tokens(library: KernelLibrary, logits: torch.Tensor, rows: Sequence[RowSettings | None]) -> list[int]:
    """Returns the next token of each row of `logits`, (len(rows), vocab), float32, contiguous. A row of None takes its
    likeliest token. Returns -1 for a row whose highest logit is NaN or infinite, before or after the edits.

    Overwrites `logits`."""
    count, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.is_contiguous() and count == len(rows)  # noqa: PT018
    settings = array("Q", [0 if row is None else ctypes.addressof(row) for row in rows])
    token_ids = array("q", bytes(8 * count))
    places = settings.buffer_info()[0], token_ids.buffer_info()[0]
    library.choose(logits.data_ptr(), vocab, count, *places, num_threads())
    return token_ids.tolist()
