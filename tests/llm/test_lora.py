"""With adapters, greedy tokens equal those of `generate` with merged weights, however the engine mixes the work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.lora.request import LoraRequest
from tests.adapters import merge_adapter, save_adapter
from tests.llm.greedy_answers import PARAMS
from tests.llm.language_variants import VARIANTS
from tests.small_models import NUM_TOKENS, Request, small_requests, whole_class

pytestmark = pytest.mark.long

KV_CACHE_BYTES = 2**22
FURTHER_FAMILIES = ("qwen2_vl", "gemma3n", "internvl, qwen3", "aria")
FAMILIES = ("llava", "gemma3", *(pytest.param(one, marks=pytest.mark.slow) for one in FURTHER_FAMILIES))


@dataclass(frozen=True)
class Served:
    """A checkpoint with adapters. `requests`: by adapter, the same prompts with what the adapter answers."""

    checkpoint: str
    requests: dict[LoraRequest | None, list[Request]]

    @property
    def loras(self) -> list[LoraRequest]:
        return [lora for lora in self.requests if lora is not None]

    @property
    def mixed(self) -> list[tuple[LoraRequest | None, Request]]:
        """All prompts with all adapters, in turns."""
        return [
            (lora, requests[index])
            for index in range(len(self.requests[None]))
            for lora, requests in self.requests.items()
        ]

    def engine(self, **settings: Any) -> LLMEngine:
        defaults = {"kv_cache_bytes": KV_CACHE_BYTES, "max_num_seqs": 16, "max_loras": 3, "max_lora_rank": 8}
        return LLMEngine(EngineConfig(self.checkpoint, **{**defaults, **settings}))


@pytest.fixture(scope="session", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    variant = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp("served")
    checkpoint = variant.checkpoint(folder / "model")

    def whole() -> PreTrainedModel:
        return whole_class(variant.model_type).from_pretrained(checkpoint, dtype=torch.float32).eval()

    saved = [
        save_adapter(folder / "all", whole(), seed=1, rank=4),
        save_adapter(folder / "other", whole(), seed=2, rank=8, use_rslora=True, spread=0.5),
        # As PEFT's defaults choose them for many models.
        save_adapter(
            folder / "few",
            whole(),
            seed=3,
            rank=2,
            spread=2,
            targets=lambda name: name.endswith(("q_proj", "v_proj", "wqkv")),
        ),
    ]
    requests: dict[LoraRequest | None, list[Request]] = {None: small_requests(variant.model_type, whole())}
    for path in saved:
        requests[LoraRequest(path.name, str(path))] = small_requests(variant.model_type, merge_adapter(whole(), path))
    for several in zip(*requests.values(), strict=True):
        assert len({tuple(one.expected) for one in several}) == len(requests), "answers must depend on the adapter"
    return Served(checkpoint, requests)


def answers(engine: LLMEngine, requests: Sequence[tuple[LoraRequest | None, Request]]) -> list[list[int]]:
    for index, (lora, one) in enumerate(requests):
        engine.add_request(str(index), one.prompt, one.embeddings, PARAMS, lora=lora)
    collected: list[list[int]] = [[] for _ in requests]
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            collected[int(output.request_id)] += output.token_ids
    engine.check_integrity()
    return collected


def expected(requests: Sequence[tuple[LoraRequest | None, Request]]) -> list[list[int]]:
    return [one.expected for _, one in requests]


@pytest.mark.usefixtures("with_kernels_and_without")
def test_answers_equal_those_of_merged_weights_alone_and_together(served: Served) -> None:
    engine = served.engine(max_num_batched_tokens=2048, prefix_caching=False)
    for one in served.mixed:
        assert answers(engine, [one]) == expected([one])
    assert answers(engine, served.mixed) == expected(served.mixed)


@pytest.mark.usefixtures("with_kernels")
def test_answers_of_prompts_in_chunks_equal_those_of_merged_weights(served: Served) -> None:
    engine = served.engine(max_num_batched_tokens=16, largest_item_tokens=64)
    assert answers(engine, served.mixed) == expected(served.mixed)


def test_preempted_answers_equal_those_of_merged_weights(served: Served) -> None:
    longest = max(len(one.prompt.prompt_token_ids) for _, one in served.mixed) + NUM_TOKENS
    num_blocks = served.engine(block_size=4)._runner.num_blocks
    num_bytes = -(-longest // 4) * (KV_CACHE_BYTES // num_blocks)
    engine = served.engine(block_size=4, kv_cache_bytes=num_bytes, max_num_batched_tokens=2048)
    assert answers(engine, served.mixed) == expected(served.mixed)
    assert engine.stats.num_preemptions > 0


def test_answers_of_steps_launched_ahead_equal_those_of_merged_weights(served: Served) -> None:
    """With more adapters than places: an adapter may be read where a dropped row's was."""
    engine = served.engine(max_loras=2, max_num_batched_tokens=64, prompt_lookup=False, async_scheduling=True)
    for _ in range(2):
        assert answers(engine, served.mixed) == expected(served.mixed)


def test_no_adapter_takes_up_the_prefixes_of_another(served: Served) -> None:
    engine = served.engine(block_size=4, max_num_batched_tokens=2048)
    for _ in range(2):
        for one in served.mixed:
            assert answers(engine, [one]) == expected([one])
    assert answers(engine, served.mixed) == expected(served.mixed)


def test_more_adapters_than_places_answer_in_turn(served: Served) -> None:
    for max_loras in (1, 2):
        engine = served.engine(max_loras=max_loras, max_num_batched_tokens=2048)
        assert answers(engine, served.mixed) == expected(served.mixed)
        assert engine._adapters is not None
        assert len(engine._adapters._slots) == max_loras


def test_guessed_tokens_of_adapters_are_checked_by_the_adapter(served: Served) -> None:
    engine = served.engine(max_num_batched_tokens=2048, prompt_lookup=True)
    for lora in served.requests:
        own = [one for one in served.mixed if one[0] == lora][:2]
        assert answers(engine, own) == expected(own)


def test_steps_without_adapters_run_as_if_there_were_none(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served.engine()
    assert answers(engine, served.mixed) == expected(served.mixed)
    monkeypatch.setattr(type(engine._runner.lora_layers), "of", None)
    base = [one for one in served.mixed if one[0] is None]
    assert answers(engine, base) == expected(base)
