"""Embeddings and scores equal those of transformers' own class and processor within 1e-5."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import Gemma3ForSequenceClassification

from raylens.llm.model_runner import ModelRunner
from raylens.modeling.families import load_family
from raylens.modeling.pooling import PoolingSettings
from raylens.preprocess.hf_processor import load_processor
from raylens.preprocess.schema import PooledPrompt
from tests.pooling.checkpoints import INSTRUCTION, classifier, embedding_model, reranker
from tests.pooling.in_process import PICTURE, Given, InProcess, text
from tests.preprocess.parity import picture
from tests.small_models import make_checkpoint, whole_class

TEXTS = ("What is on the invoice?", "total", "é\n  ")
PICTURES = (0, 1, 2)
LAST: tuple[str, dict[str, Any]] = ("Pooling", {"embedding_dimension": 32, "pooling_mode": "lasttoken"})
MEAN: tuple[str, dict[str, Any]] = (
    "Pooling",
    {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False},
)
DENSE: tuple[str, dict[str, Any]] = (
    "Dense",
    {"in_features": 32, "out_features": 8, "bias": False, "activation_function": "torch.nn.modules.activation.Tanh"},
)
NORMALIZE: tuple[str, dict[str, Any]] = ("Normalize", {})
USER = "user: {}\nassistant:"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SYSTEM = f"system: {INSTRUCTION}\n"


class Whole:
    """transformers' own class and processor."""

    def __init__(self, model_type: str, checkpoint: str, model_class: Any = None) -> None:
        self.processor = load_processor(load_family("preprocess", model_type), checkpoint)
        model_class = model_class or whole_class(model_type)
        self.model: Any = model_class.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def inputs(self, prompt: str, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        return dict(self.processor(text=prompt, images=[list(pictures)] if pictures else None, return_tensors="pt"))

    @torch.inference_mode()
    def hidden(self, prompt: str, pictures: Sequence[Image.Image] = ()) -> torch.Tensor:
        found: torch.Tensor = self.model.model(**self.inputs(prompt, pictures)).last_hidden_state[0]
        return found


def assert_close(found: Sequence[npt.NDArray[Any]], expected: Sequence[npt.NDArray[Any]]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.shape == other.shape
        np.testing.assert_allclose(own, other, atol=1e-5)


@pytest.fixture(scope="module", params=["colqwen2", "colpali"])
def late_interaction(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return request.param, make_checkpoint(request.param, tmp_path_factory.mktemp("model"))


def test_a_page_and_a_query_get_the_vectors_of_their_tokens(late_interaction: tuple[str, str]) -> None:
    model_type, checkpoint = late_interaction
    given: list[Given] = [(PooledPrompt([text(one)]), []) for one in TEXTS]
    given += [(PooledPrompt([PICTURE]), [picture(index)]) for index in PICTURES]
    whole = Whole(model_type, checkpoint)
    inputs = [whole.processor.process_queries([one]) for one in TEXTS]
    inputs += [whole.processor.process_images([picture(index)]) for index in PICTURES]
    expected = []
    for one in inputs:
        one.pop("labels", None)
        with torch.inference_mode():
            expected.append(whole.model(**one).embeddings[0].numpy())
    assert_close(InProcess(checkpoint).pool(*given), expected)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("model"))


GIVEN: list[Given] = [
    *((PooledPrompt([text(one)]), []) for one in TEXTS),
    (PooledPrompt([text("a "), PICTURE, text(" b"), PICTURE]), [picture(0), picture(1)]),
    (PooledPrompt([PICTURE]), [picture(3)]),
]
PLAIN_PROMPTS = [*TEXTS, f"a {IMAGE} b{IMAGE}", IMAGE]


def expected_of(whole: Whole, prompts: Sequence[str], pool: Any) -> list[npt.NDArray[Any]]:
    pictures = [pictures for _, pictures in GIVEN]
    return [pool(whole.hidden(*one)).numpy() for one in zip(prompts, pictures, strict=True)]


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


@pytest.mark.parametrize("rows", ["last", "mean"])
def test_any_checkpoint_embeds_by_the_settings(plain: str, rows: Any) -> None:
    pool = {"last": lambda hidden: unit(hidden[-1:]), "mean": lambda hidden: unit(hidden.mean(0, keepdim=True))}
    ours = InProcess(plain, PoolingSettings(rows=rows))
    assert_close(ours.pool(*GIVEN), expected_of(Whole("qwen3_vl", plain), PLAIN_PROMPTS, pool[rows]))


@pytest.mark.parametrize("rows", ["last", "mean"])
def test_prompts_in_chunks_from_the_cache_and_preempted_are_the_same(plain: str, rows: Any) -> None:
    settings = PoolingSettings(rows=rows)
    long: list[Given] = [(PooledPrompt([text("abcdefgh " * (7 + index))]), []) for index in range(3)] + GIVEN
    expected = InProcess(plain, settings).pool(*long)
    chunked = InProcess(plain, settings, max_num_batched_tokens=16, max_num_seqs=8, block_size=4)
    assert_close(chunked.pool(*long), expected)
    # A second time, prefixes are there.
    assert_close(chunked.pool(*long), expected)
    assert (chunked.engine.stats.num_prefix_hits > 0) == (rows == "last")
    lengths = [len(chunked.made(*one)[0].prompt_token_ids) for one in long]
    num_blocks = max(-(-length // 4) for length in lengths) + 2
    with patch.object(ModelRunner, "_count_blocks", lambda runner: (num_blocks, 0)):
        tight = InProcess(plain, settings, max_num_batched_tokens=16, max_num_seqs=8, block_size=4)
    assert_close(tight.pool(*long), expected)


@pytest.mark.parametrize("modules", [[LAST, NORMALIZE], [MEAN], [MEAN, DENSE, NORMALIZE]], ids=str)
def test_the_modules_of_sentence_transformers_apply(tmp_path: Path, modules: list[tuple[str, dict[str, Any]]]) -> None:
    checkpoint = embedding_model(tmp_path, modules)

    def pool(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden[-1:] if LAST in modules else hidden.mean(0, keepdim=True)
        if DENSE in modules:
            rows = torch.tanh(rows @ load_file(tmp_path / "2_Dense" / "model.safetensors")["linear.weight"].T)
        return unit(rows) if NORMALIZE in modules else rows

    prompts = [SYSTEM + USER.format(one) for one in PLAIN_PROMPTS]
    assert_close(InProcess(checkpoint).pool(*GIVEN), expected_of(Whole("qwen3_vl", checkpoint), prompts, pool))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dense_layers_of_a_half_precision_model(tmp_path: Path, dtype: Any) -> None:
    checkpoint = embedding_model(tmp_path, [MEAN, DENSE, NORMALIZE])
    expected = InProcess(checkpoint).pool(GIVEN[0])
    for found, exact in zip(InProcess(checkpoint, dtype=dtype).pool(GIVEN[0]), expected, strict=True):
        np.testing.assert_allclose(found, exact, atol=0.05)


def test_a_reranker_scores_by_its_two_tokens(tmp_path: Path) -> None:
    checkpoint = reranker(tmp_path)
    whole = Whole("qwen3_vl", checkpoint)
    given: list[Given] = [
        (PooledPrompt([text("a cat")], [text("what?")]), []),
        (PooledPrompt([PICTURE], [text("what?")], instruction="Judge."), [picture(0)]),
        (PooledPrompt([PICTURE, text("x")], [PICTURE]), [picture(1), picture(2)]),
    ]
    prompts = [
        "<Query>: what?\n<Document>: a cat\nAnswer: ",
        f"<Instruct>: Judge.\n<Query>: what?\n<Document>: {IMAGE}\nAnswer: ",
        f"<Query>: {IMAGE}\n<Document>: {IMAGE}x\nAnswer: ",
    ]
    expected = []
    for prompt, (_, pictures) in zip(prompts, given, strict=True):
        with torch.inference_mode():
            logits = whole.model.lm_head(whole.hidden(prompt, pictures)[-1])
        expected.append((logits[40] - logits[41]).numpy().reshape(1, 1))
    assert_close(InProcess(checkpoint).pool(*given), expected)


def test_a_classifier_returns_the_logits_of_its_classes(tmp_path: Path) -> None:
    checkpoint = classifier(tmp_path)
    whole = Whole("gemma3", checkpoint, Gemma3ForSequenceClassification)
    given: list[Given] = [(PooledPrompt([text(one)]), []) for one in TEXTS] + [(PooledPrompt([PICTURE]), [picture(0)])]
    prompts = [*TEXTS, "<start_of_image>"]
    expected = []
    for prompt, (_, pictures) in zip(prompts, given, strict=True):
        with torch.inference_mode():
            expected.append(whole.model(**whole.inputs(prompt, pictures)).logits.numpy())
    ours = InProcess(checkpoint)
    assert ours.pooling.labels == ("class 0", "class 1", "class 2")
    assert_close(ours.pool(*given), expected)
