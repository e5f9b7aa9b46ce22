"""The tower and the projector of the plug-ins here: each on a device of its own, in as many bits as is asked for."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from raylens.modeling.packed_linear import pack_linear_layers
from raylens.preprocess.vision_plugins.interface import VisionPluginError


class PlacedPart:
    """A loaded module on its device and in its dtype, in evaluation mode. What it is called with goes there, too."""

    def __init__(self, module: nn.Module, device: str, bits: int) -> None:
        """Changes `module` in place. 32 `bits` are float32. 16 are bfloat16, on GPUs float16. 8, on the CPU only, are
        linear layers with weights of int8, and all else in float32. Raises VisionPluginError for other numbers of
        bits."""
        is_on_gpu = torch.device(device).type == "cuda"
        allowed = (32, 16) if is_on_gpu else (32, 16, 8)
        if bits not in allowed:
            choices = ", ".join(map(str, allowed))
            raise VisionPluginError(f"the parts of a vision plug-in on {device} have one of {choices} bits, not {bits}")
        half = torch.float16 if is_on_gpu else torch.bfloat16
        self._device, self._dtype = device, half if bits == 16 else torch.float32
        module.to(self._device, self._dtype)
        if bits == 8:
            pack_linear_layers(module, self._dtype, precision_of=lambda name: "int8")
        self._module = module.eval().requires_grad_(False)

    def __call__(self, inputs: torch.Tensor, **options: Any) -> Any:
        return self._module(inputs.to(self._device, self._dtype), **options)


def read_weights(place: str, name: str) -> dict[str, Any]:
    """Returns the tensors of the file `name` in a folder or a repository of the hub, or of the file that `place` is.

    Only tensors are read: a pickle with anything else in it raises VisionPluginError, and so does a missing file."""
    try:
        file = Path(place)
        if not file.exists():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(place, name))
        elif file.is_dir():
            file /= name
        weights: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise VisionPluginError(f"the weights {name} of {place} cannot be read: {error}") from error
    return weights
