"""What an engine on a GPU does before its first request: later steps wait for no compiler, and what would fail every
request fails the start, with its reason."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from raylens.llm.cuda.first_steps import missing_tools, missing_tools_named
from raylens.llm.engine import LLMEngine
from raylens.llm.ranks.parallel import RankDiedError
from raylens.llm.step_input import StepInput
from raylens.modeling.cuda_graphs import NotRecordableError
from tests.llm.language_variants import VARIANTS
from tests.small_models import make_checkpoint

pytest.importorskip("triton")

from triton.runtime import build

from raylens.llm.cuda import attention as cuda_attention
from raylens.llm.cuda.decode_kernels import paged_decode
from tests.llm.graph_recorder import Recorder, with_graphs
from tests.llm.test_decode_graphs import make_engine

ROOT = Path(__file__).parent.parent.parent
# A kind of layer has three: for whole contexts, for splits, and for merging these. Merging is the same for all kinds.
KERNELS_OF = {1: 3, 2: 5}


@pytest.mark.parametrize(
    ("name", "dtype", "num_kinds"),
    [
        pytest.param("llava", "float32", 1, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "float32", 1, marks=pytest.mark.slow),
        pytest.param("gemma3", "bfloat16", 2, marks=pytest.mark.slow),
        # Queries of a single row lie among others, at addresses that are no multiples of 16.
        ("llava, one key-value head", "bfloat16", 1),
    ],
)
def test_no_later_step_waits_for_triton(tmp_path: Path, name: str, dtype: str, num_kinds: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = (
        "import sys; from raylens.modeling.torchvision_build import make_importable; make_importable()\n"
        "from tests.llm.kernel_keys import print_keys; print_keys(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, VARIANTS[name].checkpoint(tmp_path), dtype]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    at_start, later = json.loads(ended.stdout.splitlines()[-1])
    assert later == []
    assert len(at_start) == KERNELS_OF[num_kinds]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llava", tmp_path_factory.mktemp("model"))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def engine(checkpoint: str, recorder: Recorder) -> LLMEngine:
    engine = make_engine(checkpoint)
    with_graphs(engine._runner, recorder)
    return engine


def start(engine: LLMEngine) -> None:
    engine._runner._run_first_steps()


def test_the_first_steps_decode_with_and_without_a_graph(
    engine: LLMEngine, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[list[int]] = []

    def noted(*args: Any, **others: Any) -> None:
        decoded.append(args[3].lengths.tolist())
        paged_decode(*args, **others)

    monkeypatch.setattr(cuda_attention, "paged_decode", noted)
    start(engine)
    runner = engine._runner
    longest = min(runner.context_length, runner.num_blocks * engine._config.block_size)
    assert [lengths for before, lengths in zip([[], *decoded], decoded, strict=False) if lengths != before] == [
        [2],
        [longest],
        [2],
    ]
    assert recorder.replayed == [1]


def test_the_first_steps_leave_rotary_embeddings_as_they_are(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some follow the longest context so far, and would rotate a short one in another way then."""
    forward, highest = engine._runner.forward, [0]

    def noted(step: StepInput, attention: Any) -> Any:
        highest.append(int(step.positions.max()))
        return forward(step, attention)

    monkeypatch.setattr(engine._runner, "forward", noted)
    start(engine)
    assert max(highest) == 0
    assert len(highest) > 1


def test_the_first_steps_write_to_no_block_of_a_sequence(engine: LLMEngine) -> None:
    attention: Any = engine._runner._attention
    before = []
    for tensor in (*attention._keys, *attention._values):
        tensor.normal_()
        before.append(tensor.clone())
    start(engine)
    for tensor, kept in zip((*attention._keys, *attention._values), before, strict=True):
        assert torch.equal(tensor[:-1], kept[:-1])
        assert not torch.equal(tensor[-1], kept[-1])


@pytest.mark.parametrize(
    "broken", ["raylens.llm.cuda.attention.paged_decode", "raylens.llm.prefill_chunks.attend_chunk"]
)
def test_attention_that_fails_ends_the_start(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("this kernel fails")

    monkeypatch.setattr(broken, fail)
    with pytest.raises(RuntimeError, match="this kernel fails"):
        start(engine)


def test_a_graph_that_fails_when_it_is_replayed_ends_the_start(engine: LLMEngine, recorder: Recorder) -> None:
    def fail() -> Any:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    graphs: Any = engine._runner._graphs
    graphs._replays[1] = fail
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        start(engine)


def capture(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> Any:
    """What a runner makes of graphs where recording raises `error`."""

    class Failing:
        def __init__(self, device: torch.device) -> None:
            pass

        def __call__(self, function: Any) -> Any:
            raise error

    monkeypatch.setattr("raylens.llm.model_runner.CudaCapture", Failing)
    return engine._runner._capture_graphs()


def test_a_model_that_cannot_be_recorded_decodes_without_graphs(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert capture(engine, monkeypatch, NotRecordableError("it waits for the GPU")) is None
    assert "cannot run as CUDA graphs" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("an illegal memory access was encountered"),
        RuntimeError("Failed to find C compiler"),
    ],
)
def test_what_fails_while_recording_ends_the_start(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    with pytest.raises(type(error), match=str(error)):
        capture(engine, monkeypatch, error)


def without_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(folder))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_compiler(monkeypatch, tmp_path)
    reason = "with a C compiler, which this machine lacks.*gcc and python3-dev"
    with pytest.raises(RuntimeError, match=reason), missing_tools_named():
        build._build("launcher", "launcher.c", str(tmp_path), [], [], [], [])
    monkeypatch.setenv("CC", "no-such-compiler")
    assert missing_tools() == ["the C compiler no-such-compiler"]


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert missing_tools() == [], "the machine of the tests has all of it"
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    with pytest.raises(RuntimeError, match="with Python's headers, which this machine lacks"), missing_tools_named():
        raise subprocess.CalledProcessError(1, ["gcc"])


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), torch.AcceleratorError("failed"), RankDiedError("gone")]
)
def test_other_failures_are_not_blamed_on_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: RuntimeError
) -> None:
    without_compiler(monkeypatch, tmp_path)
    with pytest.raises(type(error), match=str(error)), missing_tools_named():
        raise error


def test_a_machine_that_lacks_nothing_is_not_blamed() -> None:
    with pytest.raises(ValueError, match="another reason"), missing_tools_named():
        raise ValueError("another reason")


@pytest.mark.gpu
def test_an_engine_without_a_compiler_does_not_start(checkpoint: str, tmp_path: Path) -> None:
    program = (
        "import sys; from raylens.modeling.torchvision_build import make_importable; make_importable()\n"
        "from raylens.llm.config import EngineConfig; from raylens.llm.engine import LLMEngine\n"
        "LLMEngine(EngineConfig(sys.argv[1], device='cuda', dtype='bfloat16', kv_cache_bytes=2**20))"
    )
    folder = tmp_path / "nothing"
    folder.mkdir()
    environment = {**os.environ, "PATH": str(folder), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("CC", None)
    ended = subprocess.run(
        [sys.executable, "-c", program, checkpoint], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode != 0
    assert "Triton compiles kernels with a C compiler, which this machine lacks" in ended.stderr
