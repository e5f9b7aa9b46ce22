"""Sets torch up in a replica."""

import os


def set_up_torch(num_cpus: float) -> None:
    """Call this in a replica before it imports torch or transformers. It bounds torch's threads to the CPUs that the
    replica has reserved."""
    prepare_torch()
    import torch

    torch.set_num_threads(max(1, int(num_cpus)))


def prepare_torch() -> None:
    """Call this before torch or transformers are imported. It makes torchvision importable, and has threads of torch
    sleep that have nothing to do.

    Otherwise they would keep cores busy for a millisecond after each operation, and Raylens' own kernels, which have
    other threads, would get no core meanwhile: a vision tower took 1.7 times as long."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    from raylens.modeling.torchvision_build import make_importable

    make_importable()
