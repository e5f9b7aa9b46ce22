"""What a step of the decoder asks of a device. Counted on the CPU, where nothing has to wait for it."""

from pathlib import Path

import pytest

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
