"""What a step of the decoder asks of a device. Counted on the CPU, where nothing has to wait for it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from raylens.cpu_kernels.library import VARIABLE
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ProcessedPrompt
from tests.llm.language_variants import VARIANTS
from tests.llm.operations import WAITING, HostReads, Operations, noted


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


def test_between_two_launches_the_host_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With asynchronous scheduling; each step's tokens are read once, when the next step is launched."""
    monkeypatch.setenv(VARIABLE, "off")
    checkpoint = VARIANTS["llava"].checkpoint(tmp_path)
    engine = LLMEngine(EngineConfig(checkpoint, kv_cache_bytes=2**22, prompt_lookup=False, async_scheduling=True))
    events: list[str] = []
    monkeypatch.setattr(engine._runner, "run", noted(events, "launch", engine._runner.run))
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "top_k": 5}, {"temperature": 1, "min_p": 0.1}]
    for index, kind in enumerate(kinds):
        prompt = ProcessedPrompt(list(range(2, 9 + index)), [], [])
        params = SamplingParams(max_tokens=6, min_tokens=4, ignore_eos=True, **kind)
        engine.add_request(str(index), prompt, [], params)
    with HostReads(events), Operations() as operations:
        while engine.has_unfinished():
            engine.step()
    assert events == ["launch", *["launch", "tolist"] * 5, "tolist"]
    assert operations.counts.keys() & WAITING == set(), operations.counts


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemma3", "llava", "paligemma 2", "qwen2_5_vl"])
def test_on_a_gpu_no_operation_waits(name: str, tmp_path: Path) -> None:
    """PyTorch itself raises where one would. To wait for a step's event is no operation."""
    engine = LLMEngine(EngineConfig(VARIANTS[name].checkpoint(tmp_path), kv_cache_bytes=2**22, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(3):
            prompt = ProcessedPrompt(list(range(2, 9 + index)), [], [])
            params = SamplingParams(max_tokens=6, temperature=0.7, top_k=9, repetition_penalty=1.1, ignore_eos=True)
            engine.add_request(str(index), prompt, [], params)
            engine.step()
        while engine.has_unfinished():
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
