"""Models of all kinds, most of them without a declaration, over HTTP: greedy tokens equal those of `generate`."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import deployed_app
from raylens.deployments.stages.found_model_check import known_inputs
from raylens.modeling.families import is_found
from raylens.modeling.found_model import arguments_of
from raylens.preprocess.models.found import call_processor
from tests.model_coverage.small_checkpoints import save_small_checkpoint
from tests.pictures import encoded, user_message
from tests.preprocess.parity import picture

NUM_TOKENS = 12
QUESTIONS: list[tuple[str, list[int]]] = [("What is it?", [0]), ("What is it?", [1]), ("And these two?", [2, 3])]


class Oracle:
    """The whole model and its processor."""

    def __init__(self, checkpoint: Path) -> None:
        self._processor: Any = AutoProcessor.from_pretrained(checkpoint)
        self._model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._model.generation_config = GenerationConfig()  # its end tokens would end answers
        # `generate` would take a placeholder in an answer for another picture.
        self.suppressed = sorted(self._processor.tokenizer.added_tokens_decoder)

    def expected(self, text: str, pictures: list[int]) -> tuple[list[int], list[int]]:
        content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
        prompt = self._processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        images = [picture(index) for index in pictures]
        inputs = dict(call_processor(self._processor, prompt, images, return_mm_token_type_ids=True))
        inputs = known_inputs(inputs, arguments_of(self._model.forward))
        greedy = GenerationConfig(
            max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, suppress_tokens=self.suppressed
        )
        ids = inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            output = self._model.generate(**inputs, generation_config=greedy)
        return ids, output[0, len(ids) :].tolist()


def slow(model_type: str) -> Any:
    return pytest.param(model_type, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_5",
        *map(slow, ("deepseek_ocr2", "gemma4", "glm46v", "granite_docling", "kimi_k25", "lfm2_vl", "llama4")),
        *map(slow, ("minicpmv4_7", "paddleocr_vl", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe")),
    ],
)
def test_answers_are_those_of_generate(model_type: str, tmp_path: Path, ray_port: int) -> None:
    save_small_checkpoint(model_type, tmp_path)
    oracle = Oracle(tmp_path)
    config = AppConfig.model_validate({"model": str(tmp_path), "served_model_name": "small"})
    bias = dict.fromkeys(map(str, oracle.suppressed), -100)

    def ask(question: tuple[str, list[int]]) -> Any:
        text, pictures = question
        return client.chat.completions.create(
            model="small",
            messages=[user_message(text, *(encoded(picture(index)) for index in pictures))],
            temperature=0,
            max_tokens=NUM_TOKENS,
            logit_bias=bias,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )

    with deployed_app(config, host="127.0.0.1", port=ray_port) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            completions = list(pool.map(ask, QUESTIONS))
        health = httpx.get(f"{url}/health").json()
    answers = [(one.prompt_token_ids, one.choices[0].token_ids) for one in completions]
    assert answers == [oracle.expected(*question) for question in QUESTIONS]
    assert len({tuple(answer) for _, answer in answers}) > 1, "answers must depend on the input"
    told = health["details"]["generate"].get("family", "declared")
    assert told.startswith("found, self-tested: ") == is_found(model_type)
