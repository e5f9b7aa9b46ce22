"""Makes a multimodal pipeline the vision half of a text model: it takes the items of a batch and returns embeddings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import nn

from raylens.encoder.config import EncoderConfig
from raylens.encoder.models.family import VisionFamily, VisionModality, all_together
from raylens.encoder.time_limit import GivenUpError, TimeLimit
from raylens.modeling.model_configs import load_model_config
from raylens.preprocess.schema import ItemTensors
from raylens.preprocess.vision_plugins.interface import MultimodalPipeline, PipelineError
from raylens.preprocess.vision_plugins.registry import PipelineChoice, find_pipeline


class PipelineHalf(nn.Module):
    """A pipeline with its weights, for a text model of a hidden size. Its cost of a picture is the same for all."""

    def __init__(self, pipeline: MultimodalPipeline, config: Any, timeout_s: float) -> None:
        """`config`: the configuration of the text model. `timeout_s`: how many seconds a call may take."""
        super().__init__()
        self.config = config
        self._pipeline = pipeline
        self._limit = TimeLimit(timeout_s)
        self._is_measured = False

    @property
    def has_hung(self) -> bool:
        """Returns whether a call was given up. It still takes memory, and perhaps a processor."""
        return self._limit.num_given_up > 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Within it calls run on the caller's thread, where the memory that they take can be counted, and may take as
        long as they need."""
        self._is_measured = True
        try:
            yield
        finally:
            self._is_measured = False

    def embed(self, items: Sequence[ItemTensors]) -> list[torch.Tensor]:
        """Takes items with `pixels`, (height, width, 3) uint8 on the CPU. Returns (num_image_embeds, hidden_size) of
        each.

        Raises PipelineError where the pipeline fails, takes too long or returns something else."""
        images = [Image.fromarray(item["pixels"].numpy()) for item in items]
        name = self._pipeline.name()
        try:
            embeds = self._embed(images) if self._is_measured else self._limit.run(lambda: self._embed(images))
        except torch.AcceleratorError:
            raise
        except GivenUpError as error:
            raise PipelineError(f"the multimodal pipeline {name!r} took {error} for this picture") from error
        except Exception as error:
            raise PipelineError(f"the multimodal pipeline {name!r} failed on this picture") from error
        expected = (len(images), self._pipeline.num_image_embeds(), self.config.get_text_config().hidden_size)
        shape = tuple(embeds.shape) if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        if shape != expected:
            raise PipelineError(
                f"the multimodal pipeline {name!r} returned embeddings of shape {shape}, it should be {expected}"
            )
        return list(embeds)

    @torch.inference_mode()
    def _embed(self, images: list[Image.Image]) -> Any:
        return self._pipeline.embed_images(images)


def load_pipeline_half(config: EncoderConfig, choice: PipelineChoice) -> tuple[PipelineHalf, VisionFamily]:
    """Returns the chosen pipeline, with its weights loaded, and how it encodes pictures.

    Raises PipelineError if there is no such pipeline, or if it cannot load."""
    pipeline = find_pipeline(choice, config.model)
    try:
        getattr(pipeline, "load", lambda: None)()
    except Exception as error:
        raise PipelineError(f"the multimodal pipeline {pipeline.name()!r} cannot load: {error!r}") from error
    num_embeds = pipeline.num_image_embeds()
    image = VisionModality(
        encode=lambda model, items: model.embed(items),
        num_patches=lambda config, item: num_embeds,
        batch_key=all_together,
        on_host=frozenset({"pixels"}),
    )
    half = PipelineHalf(pipeline, load_model_config(config.model, config.revision), config.pipeline_timeout_s)
    # The pipeline has no parts that the encoder could place, divide or record.
    return half, VisionFamily(whole="", unused=(), tower="", projector=(), modalities={"image": image})
