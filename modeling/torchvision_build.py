"""Makes torchvision importable with a torch build that it was not compiled for.

torchvision's wheels contain operators compiled for a CUDA build of torch. With a CPU build they do not load, and
`import torchvision` fails because it refers to missing operators. Preprocessing needs the image and video transforms
only, which are plain Python. Declaring the operators without an implementation is therefore enough."""

import importlib.util
import sys
from typing import Any

import torch

_OPERATORS = (
    *("nms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align", "ps_roi_pool"),
    *("_ps_roi_align_backward", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward"),
    *("qnms", "qroi_align"),
)
_declared: list[Any] = []  # keeps the declaring objects alive, and with them the operators


def make_importable() -> bool:
    """Makes `import torchvision` work if torchvision is installed. Returns whether it is installed. Call this before
    importing transformers' image processors."""
    if importlib.util.find_spec("torchvision") is None:
        return False
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declare_operators()
        import torchvision  # noqa: F401
    return True


def _declare_operators() -> None:
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in _OPERATORS:
        library.define(f"{name}(Tensor input) -> Tensor")
    _declared.append(library)
