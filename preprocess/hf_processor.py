"""Loads a model's Hugging Face processor, with the chosen image back end."""

from functools import partial
from typing import Any, Literal, TypeAlias

import transformers

from raylens.modeling.torchvision_build import make_importable
from raylens.preprocess.models.family import Backend, HFProcessor, ProcessorFamily

ImageBackend: TypeAlias = Literal["auto"] | Backend
"""`auto`: the faster torchvision if it is installed and the family supports it, else Pillow. Their pixels differ by 1
or 2 grey levels."""


def load_processor(
    family: ProcessorFamily, model: str, *, revision: str | None = None, backend: ImageBackend = "auto"
) -> HFProcessor:
    """Loads the processor of the checkpoint `model`, a folder or a hub id. Raises ValueError if the family does not
    support `backend` or it is not installed."""
    has_torchvision = make_importable()
    backend = _choose(backend, family.backends, has_torchvision)
    loader: Any = family.processor_class
    if isinstance(loader, str):
        processor_class = getattr(transformers, loader)
        if backend == "pil" and "video_processor" in processor_class.get_attributes():
            processor_class = _with_pillow(processor_class, has_torchvision)
        # With code in the checkpoint, transformers would otherwise ask on a terminal whether to run it.
        loader = partial(processor_class.from_pretrained, trust_remote_code=False)
    else:
        loader = loader.from_pretrained
    processor: HFProcessor = loader(model, revision=revision, backend=backend)
    family.mend(processor)
    return processor


def _choose(backend: ImageBackend, backends: tuple[Backend, ...], has_torchvision: bool) -> Backend:
    if backend == "auto":
        backend = "pil" if "pil" in backends and not (has_torchvision and "torchvision" in backends) else "torchvision"
    if backend not in backends:
        raise ValueError(f"this model has no image back end {backend}, only {', '.join(backends)}")
    if backend == "torchvision" and not has_torchvision:
        raise ValueError("the image back end torchvision is not installed")
    return backend


def _with_pillow(processor_class: Any, has_torchvision: bool) -> Any:
    """Returns a subclass of `processor_class` that processes pictures with Pillow.

    transformers has no video processors for Pillow, so videos still use torchvision. Without torchvision the processor
    is loaded without a video processor."""

    class PillowProcessor(processor_class):
        @classmethod
        def _get_arguments_from_pretrained(
            cls, model: str, processor_dict: Any = None, *, backend: ImageBackend, **kwargs: Any
        ) -> list[Any]:
            kwargs = {name: value for name, value in kwargs.items() if name not in ("subfolder", "trust_remote_code")}
            parts: dict[str, Any] = dict.fromkeys(cls.get_attributes())
            parts["tokenizer"] = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False, **kwargs)
            parts["image_processor"] = transformers.AutoImageProcessor.from_pretrained(
                model, backend=backend, trust_remote_code=False, **kwargs
            )
            if has_torchvision:
                parts["video_processor"] = transformers.AutoVideoProcessor.from_pretrained(
                    model, trust_remote_code=False, **kwargs
                )
            return list(parts.values())

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    PillowProcessor.__name__ = processor_class.__name__
    return PillowProcessor
