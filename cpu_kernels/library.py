"""Finds and loads the library for this processor. ctypes releases the GIL during each call."""

import ctypes
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

VARIABLE = "RAYLENS_CPU_KERNELS"
"""The environment variable with the library to use: one of BUILDS, or `off` for none."""
BUILDS = ("amx", "avx512", "avx2", "baseline")
"""The libraries, from the fastest to the most portable. All have the same functions."""
# By PyTorch's name of the processor's instruction set: the fastest build that runs on it.
_FASTEST = {"AVX512": "avx512", "AVX2": "avx2"}

_address, _integer, _float, _threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "is_usable": ([], _integer),
    "panel": ([], _integer),
    "lanes": ([], _integer),
    "packed_bytes": ([_address], _integer),
    "pack": ([_address, _address, _threads], None),
    "quantize": ([_address, _threads], None),
    "rows": ([_address, _address, _integer, _float, _address, _threads], None),
    "product": ([_address, _integer, _address, _address, _address, _threads], None),
    "mlp": ([_address, _integer, _address, _address, _threads], None),
    "attend": ([_address, _address, _address, _threads], None),
    "attend_pictures": ([_address, _address, _threads], None),
    "norm": ([_address, _address, _integer, _integer, _address, _threads], None),
    "rotate": ([_address, _threads], None),
    "delta_rows": ([_address, _threads], None),
    "choose": ([_address, _integer, _integer, _address, _address, _threads], None),
    "decode": ([_address, _address, _address, _threads], _integer),
}


class KernelLibrary:
    """One loaded build. Its functions take addresses, see RAYLENS_EXPORT in `csrc/`.

    The columns of a packed weight are padded to a multiple of `panel_columns`, and the rows of the cache to a multiple
    of `lanes`."""

    is_usable: Callable[[], int]
    packed_bytes: Callable[..., int]
    pack: Callable[..., None]
    quantize: Callable[..., None]
    rows: Callable[..., None]
    product: Callable[..., None]
    mlp: Callable[..., None]
    attend: Callable[..., None]
    attend_pictures: Callable[..., None]
    norm: Callable[..., None]
    rotate: Callable[..., None]
    delta_rows: Callable[..., None]
    choose: Callable[..., None]
    decode: Callable[..., int]

    def __init__(self, build: str, path: Path) -> None:
        self.build = build
        library = ctypes.CDLL(str(path))
        for name, (arguments, result) in _SIGNATURES.items():
            function = library[f"raylens_{name}"]
            function.argtypes, function.restype = arguments, result
            setattr(self, name, function)
        self.panel_columns = int(library["raylens_panel"]())
        self.lanes = int(library["raylens_lanes"]())


def kernel_library() -> KernelLibrary | None:
    """Returns the fastest built library for this processor, or the one that VARIABLE names, or None, see `why_missing`.
    Raises ValueError if VARIABLE names an unknown build or one that does not run on this processor."""
    name = os.environ.get(VARIABLE, "")
    if name == "off":
        return None
    usable = _usable_builds()
    if name and name not in usable:
        raise ValueError(f"{VARIABLE} is {name!r}; on this processor it can be {', '.join(usable)} or off")
    return next((found for build in ([name] if name else usable) if (found := _load(build)) is not None), None)


def why_missing() -> str:
    """Returns the reason why `kernel_library` has found none, to be used after a colon."""
    if os.environ.get(VARIABLE) == "off":
        return f"{VARIABLE} is off"
    if any(Path(__file__).with_name(build + suffix).exists() for build in BUILDS for suffix in EXTENSION_SUFFIXES):
        return "the libraries that were built cannot be used on this system"
    return "the package was installed without a C++ compiler"


def _usable_builds() -> tuple[str, ...]:
    fastest = _FASTEST.get(torch.backends.cpu.get_cpu_capability(), "baseline")
    if fastest == "avx512" and _has_amx():
        fastest = "amx"
    return BUILDS[BUILDS.index(fastest) :]


@cache
def _has_amx() -> bool:
    with suppress(OSError):
        return {"amx_bf16", "avx512_bf16"} <= set(Path("/proc/cpuinfo").read_text().split())
    return False


@cache
def _load(build: str) -> KernelLibrary | None:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(build + suffix)
        if path.exists():
            try:
                library = KernelLibrary(build, path)
                if library.is_usable():
                    return library
                logger.warning("the system does not let this process use the processor's %s", build)
            except (OSError, AttributeError) as error:  # built on another system, or from other sources
                logger.warning("%s cannot be used, install the package again: %s", path, error)
    return None
