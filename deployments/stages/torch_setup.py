"""Sets torch up in a replica."""


def set_up_torch(num_cpus: float) -> None:
    """Call this in a replica before it imports transformers. It bounds torch's threads to the CPUs that the replica has
    reserved."""
    import torch

    from modeling.torchvision_build import make_importable

    make_importable()
    torch.set_num_threads(max(1, int(num_cpus)))
