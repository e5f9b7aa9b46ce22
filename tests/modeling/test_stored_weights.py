"""A checkpoint's weights are loaded in the memory of their files, whatever their dtype, and give what float32 gives."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raylens.cpu_kernels.library import VARIABLE
from raylens.cpu_kernels.packed_weight import Form
from raylens.llm.config import DtypeName, EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.modeling.packed_linear import KernelLinear, PackedEmbedding
from tests.checkpoint_copies import copy_in_dtype
from tests.llm.greedy_answers import answers
from tests.small_models import make_checkpoint, small_requests, whole_class

LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 40000}
MEASURE = """
import sys
import tests.clients  # makes torchvision importable
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

LLMEngine(EngineConfig(sys.argv[1], kv_cache_bytes=2**22))
before = kilobytes("VmRSS")
engine = LLMEngine(EngineConfig(sys.argv[2], kv_cache_bytes=2**22))
print(kilobytes("VmRSS") - before, kilobytes("VmHWM") - before)
print(sum(line.rstrip().endswith(sys.argv[3]) for line in open("/proc/self/maps")))
"""


def in_dtype(source: str, folder: Path, dtype: torch.dtype) -> str:
    """A copy of a checkpoint with its matrices, but not its vectors, in this dtype."""
    return copy_in_dtype(source, folder, dtype, least_ndim=2)


@pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize(("dtype", "form"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_weights_stay_as_short_as_in_the_file(
    model_type: str, dtype: torch.dtype, form: Form, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain = make_checkpoint(model_type, tmp_path_factory.mktemp("plain"), is_tied=model_type == "gemma3")
    checkpoint = in_dtype(plain, tmp_path_factory.mktemp("short"), dtype)
    engine = LLMEngine(EngineConfig(checkpoint, kv_cache_bytes=2**22))
    model = engine._runner._model
    packed = [module.packed_weight for module in model.modules() if isinstance(module, KernelLinear | PackedEmbedding)]
    assert {weight.layout.form for weight in packed} == {form}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    requests = small_requests(
        model_type, whole_class(model_type).from_pretrained(checkpoint, dtype=torch.float32).eval()
    )
    assert answers(engine, requests) == [one.expected for one in requests]


def test_a_dtype_of_16_bits_rounds_the_weights_alone(tmp_path: Path) -> None:
    """Hidden states and the cache stay in float32, so answers are those of float32 over the rounded weights."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "rounded").mkdir()
    plain = make_checkpoint("llava", tmp_path / "plain")
    rounded = in_dtype(plain, tmp_path / "rounded", torch.bfloat16)
    engine = LLMEngine(EngineConfig(plain, dtype="bfloat16", kv_cache_bytes=2**22))
    requests = small_requests("llava", whole_class("llava").from_pretrained(rounded, dtype=torch.float32).eval())
    assert answers(engine, requests) == [one.expected for one in requests]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_kernels_weights_have_the_dtype_and_no_fewer_bits(
    dtype: DtypeName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    checkpoint = make_checkpoint("llava", tmp_path)
    model = LLMEngine(EngineConfig(checkpoint, dtype=dtype, kv_cache_bytes=2**22))._runner._model
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    with pytest.raises(ValueError, match=r"weights in int\d need Raylens' kernels for the CPU"):
        LLMEngine(EngineConfig(checkpoint, dtype=dtype, quantization="int4", kv_cache_bytes=2**22))


def test_a_tied_head_shares_the_memory_of_the_embeddings(tmp_path: Path) -> None:
    model = LLMEngine(EngineConfig(make_checkpoint("gemma3", tmp_path, is_tied=True)))._runner._model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding.packed_weight is head.packed_weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_takes_little_more_memory_than_the_file(
    dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    small = make_checkpoint("llava", tmp_path_factory.mktemp("small"))
    plain = make_checkpoint("llava", tmp_path_factory.mktemp("large"), LARGE)
    checkpoint = in_dtype(plain, tmp_path_factory.mktemp("stored"), dtype)
    weights = Path(checkpoint, "model.safetensors")
    blob = weights.rename(tmp_path_factory.mktemp("blobs") / "0123abcd")
    weights.symlink_to(blob)  # as in a cache of the hub
    command = [sys.executable, "-c", MEASURE, small, checkpoint, str(blob)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    kept, highest = (1024 * int(number) for number in output[-2].split())
    size = weights.stat().st_size
    assert size > 200 * 2**20
    assert 0.9 * size < kept < 1.15 * size
    assert highest < 1.25 * size
    assert output[-1] == "0"  # no file stays mapped: one that is replaced would end the process
