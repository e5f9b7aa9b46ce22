"""The encoder's settings."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from raylens.modeling.packed_linear import packable_dtypes
from raylens.preprocess.vision_plugins.registry import VisionPluginChoice

LinearForm = Literal["plain", "packed", "int8"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PartConfig:
    """The dtype, the device and the form of linear layers of the tower or of the projector.

    `linear` is "plain" for transformers' own layers, which give the same embeddings to the bit. "packed" layers are
    laid out for the CPU: they are faster, and their embeddings differ by rounding only. "int8" layers are packed, too,
    with weights of 8 bits. Without `exact`, the products of a tower stored in bfloat16 or float16 may round their
    inputs to the bits of that dtype.

    Raises ValueError that names the field for a value that is not supported."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    linear: LinearForm = "plain"
    exact: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {_DTYPES}, got {self.dtype}")
        if self.linear not in get_args(LinearForm):
            raise ValueError(f"linear must be one of {get_args(LinearForm)}, got {self.linear!r}")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(f"device must be one of torch's, got {self.device!r}") from error
        if self.linear != "plain" and device.type != "cpu":
            raise ValueError(f"linear can be {self.linear!r} on the CPU only, device is {self.device!r}")
        if self.linear == "int8" and self.dtype != torch.float32:
            raise ValueError(f"linear can be 'int8' with dtype float32 only, got {self.dtype}")
        if self.linear == "packed" and self.dtype not in packable_dtypes():
            dtypes = packable_dtypes()
            raise ValueError(f"linear can be 'packed' for {dtypes} only on this processor, dtype is {self.dtype}")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The settings of one encoder engine.

    `model`: a folder, or a name on the Hugging Face Hub.
    `tower`: the part that gets the pixels.
    `projector`: the part that brings the tower's features to the language model's size. Its dtype is the embeddings'.
    `max_batch_patches`: the most patches in a batch. An item with more is encoded in several batches if its family
    divides it, and otherwise alone. None stands for a number that suits the tower's device.
    `vision_plugin`: takes the place of a vision half, for a text model. It has devices and dtypes of its own.
    `plugin_timeout_s`: how many seconds the plug-in may take for a batch.
    `num_threads`: of Raylens' kernels on the CPU. None stands for one for each core, but 16 at most.

    Raises ValueError for a `max_batch_patches` below 1."""

    model: str
    revision: str | None = None
    tower: PartConfig = field(default_factory=PartConfig)
    projector: PartConfig = field(default_factory=PartConfig)
    max_batch_patches: int | None = None
    vision_plugin: VisionPluginChoice | None = None
    plugin_timeout_s: float = 40.0
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.max_batch_patches is not None and self.max_batch_patches < 1:
            raise ValueError(f"max_batch_patches must be at least 1, got {self.max_batch_patches}")

    @property
    def is_on_one_gpu(self) -> bool:
        """Returns whether the tower and the projector are on the same CUDA device."""
        tower, projector = torch.device(self.tower.device), torch.device(self.projector.device)
        # "cuda" without an index is the current device, by default 0.
        return tower.type == projector.type == "cuda" and (tower.index or 0) == (projector.index or 0)

    @property
    def batch_patches(self) -> int:
        """Returns `max_batch_patches`, or its default for the tower's device.

        A GPU needs large batches. A CPU gains nothing from them, and the items of the next batch wait longer."""
        if self.max_batch_patches is not None:
            return self.max_batch_patches
        return 1024 if torch.device(self.tower.device).type == "cpu" else 16384
