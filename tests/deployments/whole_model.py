"""A checkpoint's whole model and its processor, whose answers found halves have to give."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor, GenerationConfig

from raylens.deployments.stages.found_model_questions import known_inputs
from raylens.modeling.found_model import arguments_of
from raylens.preprocess.audio import decode_audio
from raylens.preprocess.media import AudioLimits
from raylens.preprocess.models.found import call_processor
from tests.preprocess.parity import picture
from tests.sounds import RATE

NUM_TOKENS = 12


class WholeModel:
    """`suppressed`: the special tokens, which no answer has. `generate` would take a placeholder in an answer for
    another picture."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor: Any = AutoProcessor.from_pretrained(checkpoint)
        self._model: Any = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._model.generation_config = GenerationConfig()  # its end tokens would end answers
        self.suppressed = sorted(self._processor.tokenizer.added_tokens_decoder)

    def prompt(self, content: Sequence[dict[str, Any]]) -> str:
        """The prompt of one message."""
        prompt: str = self._processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        return prompt

    def answer(
        self, prompt: str, pictures: Sequence[int] = (), sounds: Sequence[bytes] = ()
    ) -> tuple[list[int], list[int]]:
        """The ids of the prompt, and NUM_TOKENS greedy ones."""
        samples = [decode_audio(one, sampling_rate=RATE, limits=AudioLimits()) for one in sounds]
        images = [picture(index) for index in pictures]
        inputs = dict(call_processor(self._processor, prompt, images, samples, return_mm_token_type_ids=True))
        inputs = known_inputs(inputs, arguments_of(self._model.forward))
        greedy = GenerationConfig(
            max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, suppress_tokens=self.suppressed
        )
        ids = inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            output = self._model.generate(**inputs, generation_config=greedy)
        return ids, output[0, len(ids) :].tolist()
