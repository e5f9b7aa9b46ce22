"""Models of all kinds, most of them without a declaration, over HTTP: greedy tokens equal those of `generate`."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from transformers import AutoProcessor

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.local_cluster import deployed_app
from raylens.modeling.families import is_found
from tests.deployments.whole_model import NUM_TOKENS, WholeModel
from tests.exact_answers import tokens_of
from tests.model_coverage.small_checkpoints import save_small_checkpoint
from tests.pictures import encoded, user_message
from tests.preprocess.parity import picture
from tests.small_models import make_checkpoint, whole_class

QUESTIONS: list[tuple[str, list[int]]] = [("What is it?", [0]), ("What is it?", [1]), ("And these two?", [2, 3])]


def asked(
    checkpoint: Path, port: int, questions: list[tuple[str, list[int]]], bias: dict[str, int]
) -> tuple[list[Any], dict[str, Any]]:
    """The completions of all questions at once, greedy, and the health."""
    config = AppConfig.model_validate({"model": str(checkpoint), "served_model_name": "small"})

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

    with deployed_app(config, host="127.0.0.1", port=port) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)
        with ThreadPoolExecutor(len(questions)) as pool:
            return list(pool.map(ask, questions)), httpx.get(f"{url}/health").json()


def slow(model_type: str) -> Any:
    return pytest.param(model_type, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_5",
        *map(slow, ("deepseek_ocr2", "gemma4", "gemma4_unified", "glm46v", "granite4_vision", "granite_docling")),
        *map(slow, ("idefics2", "inkling_mm_model", "inkling2", "kimi_k25", "lfm2_vl", "llama4")),
        *map(slow, ("minicpmv4_7", "paddleocr_vl", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl_moe")),
    ],
)
def test_answers_are_those_of_generate(model_type: str, tmp_path: Path, ray_port: int) -> None:
    save_small_checkpoint(model_type, tmp_path)
    whole = WholeModel(tmp_path)
    completions, health = asked(tmp_path, ray_port, QUESTIONS, dict.fromkeys(map(str, whole.suppressed), -100))
    answers = list(map(tokens_of, completions))
    expected = []
    for text, pictures in QUESTIONS:
        prompt = whole.prompt([*({"type": "image"} for _ in pictures), {"type": "text", "text": text}])
        expected.append(whole.answer(prompt, pictures))
    assert answers == expected
    assert len({tuple(answer) for _, answer in answers}) > 1, "answers must depend on the input"
    told = health["details"]["generate"].get("family", "declared")
    assert told.startswith("found, self-tested: ") == is_found(model_type)


FLORENCE_TASKS: list[tuple[str, list[int]]] = [
    ("<CAPTION>", [0]),
    ("<CAPTION>", [1]),
    ("<OD>", [0]),
    ("Who is it?", [2]),
]


@pytest.mark.parametrize(
    ("model_type", "questions"), [("florence2", FLORENCE_TASKS), ("mllama", [*QUESTIONS, ("No picture?", [])])]
)
def test_answers_over_cross_attention_are_those_of_generate(
    model_type: str, questions: list[tuple[str, list[int]]], tmp_path: Path, ray_port: int
) -> None:
    make_checkpoint(model_type, tmp_path)
    if model_type == "florence2":  # published ones have no template
        (tmp_path / "chat_template.jinja").unlink()
    processor: Any = AutoProcessor.from_pretrained(tmp_path)
    model = whole_class(model_type).from_pretrained(tmp_path).eval()

    def expected(text: str, pictures: list[int]) -> tuple[int, list[int]]:
        """The number of tokens of the prompt, those for a picture among them, and the answer."""
        images = [picture(index) for index in pictures]
        options: dict[str, Any] = {}
        if processor.chat_template is not None:
            content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
            messages = [{"role": "user", "content": content}]
            text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            options["add_special_tokens"] = False  # the template has them
        inputs = processor(text=text, images=[images] if images else None, return_tensors="pt", **options)
        with torch.inference_mode():
            output = model.generate(
                **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, forced_eos_token_id=None
            )
        num_more = 19 if model_type == "mllama" else 0  # 4 tiles of 4 patches and one for all, instead of one token
        return inputs["input_ids"].shape[1] + num_more * len(pictures), output[0, -NUM_TOKENS:].tolist()

    completions, _ = asked(tmp_path, ray_port, questions, {})
    answers = [(one.usage.prompt_tokens, one.choices[0].token_ids) for one in completions]
    assert answers == [expected(*question) for question in questions]
    assert len({tuple(answer) for _, answer in answers}) == len(questions), "answers must depend on the input"
