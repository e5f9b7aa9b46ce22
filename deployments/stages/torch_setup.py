"""Sets torch up in a replica."""


def set_up_torch(num_cpus: float) -> None:
    """To be called in a replica before transformers is imported; bounds its threads to what it has reserved."""
    import torch

    from preprocess.torchvision_build import make_importable

    make_importable()
    torch.set_num_threads(max(1, int(num_cpus)))
