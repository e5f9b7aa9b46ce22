"""What the sampler sends to a device, and waits for, in one step. Counted on the CPU, where each costs nothing."""

from collections.abc import Callable

import pytest
import torch

from raylens.cpu_kernels.library import VARIABLE
from raylens.llm.host_values import HostValues
from raylens.llm.sampling.params import SamplingParams
from raylens.llm.sampling.sampler_state import SamplerState
from tests.llm.operations import SENDING, WAITING, Operations
from tests.llm.sampling import sample

VOCAB = 2000
OF_QWEN = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
SETTINGS = {
    "greedy": [SamplingParams(temperature=0)],
    "Qwen's": [OF_QWEN],
    "mixed": [
        SamplingParams(temperature=0),
        OF_QWEN,
        SamplingParams(temperature=1, min_p=0.1, seed=3),
        SamplingParams(temperature=1, top_k=5, logit_bias={5: 2.0}),
        SamplingParams(temperature=0, min_tokens=4, presence_penalty=0.5),
    ],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_go_in_one_copy_and_nothing_is_asked_for_by_the_row(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    uploads: list[HostValues] = []

    def counted(values: HostValues, upload: Callable[[HostValues], None] = HostValues.upload) -> None:
        uploads.append(values)
        upload(values)

    monkeypatch.setattr(HostValues, "upload", counted)
    states = [SamplerState(one, (1, 2), vocab_size=VOCAB, eos_token_ids=frozenset({1})) for one in 4 * SETTINGS[name]]
    logits = torch.randn(len(states), VOCAB, generator=torch.Generator().manual_seed(0))
    with Operations() as operations:
        assert None not in sample(logits, states)
    assert len(uploads) == 1
    assert operations.counts.keys() & (WAITING | SENDING) == set(), operations.counts
