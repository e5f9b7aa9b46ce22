"""Sets torch up in a replica."""

import os


def set_up_torch(num_cpus: float) -> None:
    """Limits torch's threads to the replica's reserved CPUs. Call it before the replica imports torch or
    transformers."""
    prepare_torch()
    import torch

    torch.set_num_threads(max(1, int(num_cpus)))


def prepare_torch() -> None:
    """Makes torchvision importable and makes idle torch threads sleep. Call it before torch or transformers are
    imported.

    By default, idle torch threads spin for a millisecond after each operation and starve the threads of Raylens' own
    kernels: a vision tower took 1.7 times as long."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    from raylens.modeling.torchvision_build import make_importable

    make_importable()
