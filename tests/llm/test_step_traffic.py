"""What a step of the decoder asks of a device. Counted on the CPU, where nothing has to wait for it."""

from pathlib import Path

import pytest
import torch

from cpu_kernels.library import VARIABLE
from llm.config import EngineConfig
from llm.engine import LLMEngine
from llm.sampling_params import SamplingParams
from preprocess.schema import ProcessedPrompt
from tests.llm.language_variants import VARIANTS
from tests.llm.operations import WAITING, Operations


@pytest.mark.parametrize("name", ["gemma3", "llava", "paligemma 2", "qwen2_5_vl"])
def test_no_step_waits_before_its_logits_are_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    engine = LLMEngine(EngineConfig(VARIANTS[name].checkpoint(tmp_path), kv_cache_bytes=2**22, prompt_lookup=False))
    for request_id, length in (("first", 9), ("second", 5)):
        prompt = ProcessedPrompt(list(range(2, 2 + length)), [], [])
        engine.add_request(request_id, prompt, [], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
        for _ in range(2):  # a prompt, then decodes; in the third step both are together
            with Operations() as operations:
                engine.step()
            assert operations.counts["embedding"] == 1
            assert operations.counts.keys() & WAITING == set(), operations.counts


def test_the_cpu_takes_embeddings_as_they_are(tmp_path: Path) -> None:
    engine = LLMEngine(EngineConfig(VARIANTS["llava"].checkpoint(tmp_path), kv_cache_bytes=2**22))
    assert engine.stage_embeddings is None


@pytest.mark.gpu
def test_a_gpu_takes_embeddings_from_pinned_memory(tmp_path: Path) -> None:
    checkpoint = VARIANTS["llava"].checkpoint(tmp_path)
    engine = LLMEngine(EngineConfig(checkpoint, kv_cache_bytes=2**22, device="cuda", dtype="bfloat16"))
    assert engine.stage_embeddings is not None
    staged = engine.stage_embeddings(torch.ones(4, 32))
    assert (staged.is_pinned(), staged.dtype, staged.sum().item()) == (True, torch.bfloat16, 128)
