"""Reports the CPU kernels that a stage uses."""

import logging

logger = logging.getLogger(f"ray.serve.{__name__}")


def kernels_in_use(device: str) -> dict[str, str]:
    """Returns the entry for the details of `/health`: the kernel library, or the reason why it is missing. Empty for a
    stage on another device. Logs a warning if the library is missing."""
    if device != "cpu":
        return {}
    from raylens.cpu_kernels.library import kernel_library, why_missing

    library = kernel_library()
    if library is not None:
        return {"cpu_kernels": library.build}
    logger.warning("Raylens' kernels for the CPU are not in use: %s. PyTorch computes, more slowly.", why_missing())
    return {"cpu_kernels": f"none: {why_missing()}"}
