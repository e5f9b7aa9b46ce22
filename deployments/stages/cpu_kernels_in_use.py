"""Tells which kernels a stage on the CPU computes with."""

import logging

logger = logging.getLogger(f"ray.serve.{__name__}")


def kernels_in_use(device: str) -> dict[str, str]:
    """Returns the entry for the details of `/health`: the library of Raylens' own kernels, or why there is none. It is
    empty for a stage on another device. Logs a warning where there is none."""
    if device != "cpu":
        return {}
    from raylens.cpu_kernels.library import kernel_library, why_missing

    library = kernel_library()
    if library is not None:
        return {"cpu_kernels": library.build}
    logger.warning("Raylens' kernels for the CPU are not in use: %s. PyTorch computes, more slowly.", why_missing())
    return {"cpu_kernels": f"none: {why_missing()}"}
