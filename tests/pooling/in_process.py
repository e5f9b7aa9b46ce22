"""Preprocess, Encode and Generate as plain libraries, one after the other, for prompts that are pooled."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from raylens.encoder.config import EncoderConfig
from raylens.encoder.engine import EncoderEngine
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.pooling import NO_SETTINGS, PoolingSettings
from raylens.preprocess.processor import MultiModalProcessor, ProcessorConfig
from raylens.preprocess.schema import PooledPrompt, ProcessedPrompt
from tests.pictures import encoded

Given = tuple[PooledPrompt, Sequence[Image.Image]]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


PICTURE = {"type": "image"}


class InProcess:
    """One checkpoint. `engine`: settings of the engine."""

    def __init__(self, checkpoint: str, settings: PoolingSettings = NO_SETTINGS, **engine: Any) -> None:
        self.processor = MultiModalProcessor(ProcessorConfig(checkpoint, pooling=settings))
        self._encoder = EncoderEngine(EncoderConfig(checkpoint))
        pooling = self.processor.pooling
        assert pooling is not None
        self.pooling = pooling
        self.engine = LLMEngine(EngineConfig(checkpoint, pooling=pooling, **engine))

    def pool(self, *given: Given) -> list[np.ndarray[Any, Any]]:
        """What all of these become, computed together."""
        for index, (prompt, pictures) in enumerate(given):
            self.engine.add_request(str(index), *self.made(prompt, pictures), SamplingParams(max_tokens=0), pools=True)
        found: dict[str, torch.Tensor] = {}
        while self.engine.has_unfinished():
            for output in self.engine.step():
                assert output.error is None
                assert output.finish_reason == "stop"
                assert output.pooled is not None
                found[output.request_id] = output.pooled
            self.engine.check_integrity()
        return [found[str(index)].numpy() for index in range(len(given))]

    def made(self, prompt: PooledPrompt, pictures: Sequence[Image.Image]) -> tuple[ProcessedPrompt, list[torch.Tensor]]:
        """The prompt and the embeddings of its pictures."""
        items = [self.processor.items.process("image", encoded(one), num_in_prompt=len(pictures)) for one in pictures]
        hashes = [str(hash(one.tobytes())) for one in pictures]
        rendered = self.processor.prompts.render(prompt, [info for info, _ in items], hashes)
        for index, (info, tensors) in enumerate(items):
            self._encoder.add_request(str(index), info.modality, tensors)
        embeddings: dict[str, torch.Tensor] = {}
        while self._encoder.has_unfinished():
            for output in self._encoder.step():
                assert output.embeddings is not None
                embeddings[output.request_id] = output.embeddings
        return rendered, rendered.placed([embeddings[str(index)] for index in range(len(items))])
