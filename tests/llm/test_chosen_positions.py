"""Layers that choose positions: the settings that they do not support are refused with the reason."""

from pathlib import Path

import pytest

from raylens.llm.attention_variants.indexers import _KINDS
from raylens.llm.config import EngineConfig
from raylens.llm.loader import load_language_half
from raylens.llm.model_runner import ModelRunner
from tests.llm.ranks import silent_rank
from tests.model_coverage.language_requests import save_tokenizer, small_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model")
    small_model("mistral_large4").save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def test_adapters_are_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="max_loras: a model with layers that choose or weigh positions serves"):
        ModelRunner(EngineConfig(checkpoint, max_loras=1))


def test_several_ranks_are_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="on several ranks: its layers that choose positions are not divided"):
        load_language_half(EngineConfig(checkpoint), silent_rank(0, 2))


def test_unknown_indexers_are_refused(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_KINDS, "MistralLarge4TextIndexer")
    with pytest.raises(ValueError, match="layers with an indexer of type MistralLarge4TextIndexer are not supported"):
        ModelRunner(EngineConfig(checkpoint))
