"""Lets the torchvision back end read a picture in its interleaved (channels-last) memory layout.

transformers first copies the picture to planar layout (`TorchvisionBackend.process_image`). torchvision resizes both
layouts to the same values, the interleaved one faster."""

import warnings
from typing import Any

import torch
from PIL.Image import Image
from transformers.image_processing_backends import TorchvisionBackend


def keep_pixels_interleaved(image_processor: object) -> None:
    """Changes this processor object, if it inherits `process_image` from transformers' back end unchanged."""
    kind: Any = type(image_processor)
    if not issubclass(kind, TorchvisionBackend) or kind.process_image is not TorchvisionBackend.process_image:
        return

    class Interleaved(kind):
        def process_image(self, image: Any, **options: Any) -> torch.Tensor:
            """Returns a tensor, (channels, height, width)."""
            if isinstance(image, Image) and image.mode == "RGB" and options.get("device") is None:
                return _pixels(image).permute(2, 0, 1)
            result: torch.Tensor = super().process_image(image, **options)
            return result

    Interleaved.__name__ = kind.__name__  # a part of the processor's identity
    image_processor.__class__ = Interleaved


def _pixels(image: Image) -> torch.Tensor:
    """Returns (height, width, channels), uint8."""
    with warnings.catch_warnings():
        # PyTorch warns that bytes are read-only. Nothing else refers to these.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        numbers = torch.frombuffer(image.tobytes(), dtype=torch.uint8)
    return numbers.view(image.height, image.width, 3)
