"""Which adapters are refused, and which are in memory when."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raylens.llm.adapter_slots import LoraAdapters
from raylens.llm.block_manager import shared_root
from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.lora.adapter import LinearShape, check_adapter, read_adapter
from raylens.llm.lora.layers import LoraLayers
from raylens.llm.lora.request import LoraError, LoraRequest
from raylens.llm.outputs import RequestOutput
from raylens.llm.sequence import Sequence
from tests.adapters import PREFIX, save_adapter
from tests.llm.greedy_answers import PARAMS
from tests.small_models import make_checkpoint, small_requests, whole_class

SHAPES = {
    "layers.0.self_attn.q_proj": LinearShape(8, 12),
    "layers.0.mlp.down_proj": LinearShape(20, 8),
}
FRONTS = (
    "model.language_model.",
    "language_model.model.",
    "model.language_model.model.",
    "model.",
    "language_model.",
    "",
)
Tensors = dict[str, torch.Tensor]


def tensors(front: str = "model.language_model.", rank: int = 2) -> Tensors:
    return {
        f"{PREFIX}{front}{name}.lora_{half}.weight": torch.full(size, 0.5)
        for name, shape in SHAPES.items()
        for half, size in (("A", (rank, shape.in_features)), ("B", (shape.out_features, rank)))
    }


def saved(folder: Path, weights: Tensors, **settings: Any) -> str:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def read(folder: str) -> Any:
    return read_adapter(folder, SHAPES, max_rank=4, dtype=torch.float32)


def check(folder: str) -> None:
    check_adapter(folder, SHAPES, max_rank=4)


@pytest.mark.parametrize("front", FRONTS)
def test_all_names_of_the_language_half_are_known(tmp_path: Path, front: str) -> None:
    deltas = read(saved(tmp_path, tensors(front)))
    assert deltas.keys() == SHAPES.keys()
    assert deltas["layers.0.mlp.down_proj"].a.shape == (2, 20)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 4.0),
        ({"use_rslora": True}, 8 / 2**0.5),
        ({"lora_alpha": 1}, 0.5),
        ({"alpha_pattern": {"nothing": 5, r"\w+": 2}}, 1.0),
        ({"alpha_pattern": {r"layers\.\d+\.\w+\.\w+": 6}, "use_rslora": True}, 6 / 2**0.5),
    ],
)
def test_deltas_are_scaled(tmp_path: Path, settings: dict[str, Any], scale: float) -> None:
    deltas = read(saved(tmp_path, tensors(), **settings))
    for delta in deltas.values():
        torch.testing.assert_close(delta.a, torch.full_like(delta.a, 0.5))
        torch.testing.assert_close(delta.b, torch.full_like(delta.b, 0.5 * scale))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all', only 'none'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"alpha_pattern": {"q_proj": "2"}}, r"alpha_pattern\['q_proj'\] is '2'"),
        ({"alpha_pattern": {"(": 2}}, r"alpha_pattern has '\(', which is no pattern"),
        ({"alpha_pattern": [2]}, r"alpha_pattern is \[2\]"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config is .*, only None"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"use_rslora": 1}, "use_rslora is 1"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    folder = saved(tmp_path, tensors(), **settings)
    for look in (read, check):
        with pytest.raises(LoraError, match=rf"adapter_config\.json: {reason}"):
            look(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda found: found | tensors("model.vision_tower.encoder."), "belongs to 'vision_tower'"),
        (lambda found: found | {f"{PREFIX}lm_head.lora_A.weight": torch.zeros(2, 8)}, "lm_head.lora_A.weight"),
        (lambda found: found | {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(2, 8)}, "lora_embedding_A"),
        (lambda found: found | {f"{PREFIX}model.layers.0.x.lora_magnitude_vector": torch.zeros(8)}, "magnitude"),
        (lambda found: found | {f"{PREFIX}model.layers.9.x.lora_A.weight": torch.zeros(2, 8)}, "'layers.9.x'"),
        (lambda found: dict(list(found.items())[:-1]), "not both of lora_A and lora_B"),
        (lambda found: found | tensors("model."), "of the same layer"),
        (lambda found: tensors(rank=5), r"rank .* is 5, the limit is 4 \(max_lora_rank\)"),
        (lambda found: {name: one.T.contiguous() for name, one in found.items()}, r"the model takes \[rank, "),
        (lambda found: {name: one / 0 for name, one in found.items()}, "not finite"),
        (lambda found: {}, "holds no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: Callable[[Tensors], Tensors], reason: str
) -> None:
    folder = saved(tmp_path, change(tensors()))
    # That numbers are not finite shows only where the weights are read.
    for look in (read,) if reason == "not finite" else (read, check):
        with pytest.raises(LoraError, match=rf"adapter_model\.safetensors.*{reason}"):
            look(folder)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, tensors())
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(LoraError, match=r"safetensors does not exist, and adapter_model\.bin is a pickle"):
        check(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"\x00\xff not it", b"[]"])
def test_broken_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder = saved(tmp_path, tensors())
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(LoraError, match=name):
        read(folder)


def test_prefixes_of_adapters_have_roots_of_their_own() -> None:
    loras = [None, LoraRequest("a", "/a"), LoraRequest("b", "/a"), LoraRequest("a", "/b"), LoraRequest("a", "/a", "2")]
    assert len({shared_root(*salts, lora) for salts in (("", ""), ("x", ""), ("", "x")) for lora in loras}) == 15


class SlowLayers:
    """Stands for LoraLayers of which nothing is computed."""

    shapes = SHAPES
    max_rank = 4
    dtype = torch.float32

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def load(self, slot: int, deltas: object) -> None:
        self.loaded.append(slot)


def sequence(lora: LoraRequest | None) -> Sequence:
    return Sequence("r", [1], 1, [], 2, lora=lora)


class Places:
    """Adapters with the sequences that wait for them."""

    def __init__(self, folder: Path, max_loras: int) -> None:
        path = saved(folder, tensors())
        self.a, self.b, self.c = (LoraRequest(name, path) for name in "abc")
        self.adapters = LoraAdapters(SlowLayers(), max_loras)  # type: ignore[arg-type]

    def place(self, waiting: list[Sequence], running: list[Sequence]) -> list[bool]:
        """Returns which of the waiting sequences may start, once all that can be read has been read."""
        failures = self.adapters.place(waiting, running)
        for _, future in list(self.adapters._loading.values()):
            future.exception(timeout=10)
        failures |= self.adapters.place(waiting, running)
        assert not failures
        return [one.lora_slot is not None for one in waiting]


def test_a_sequence_waits_until_its_adapter_has_a_place(tmp_path: Path) -> None:
    places = Places(tmp_path, max_loras=1)
    first, second, none = sequence(places.a), sequence(places.b), sequence(None)
    assert places.place([first, second, none], []) == [True, False, False]
    assert none.lora is None
    assert places.place([second], [first]) == [False]
    assert places.place([second], []) == [True]


def test_the_adapter_used_least_recently_is_dropped(tmp_path: Path) -> None:
    places = Places(tmp_path, max_loras=2)
    assert places.place([sequence(places.a), sequence(places.b)], []) == [True, True]
    places.place([], [sequence(places.a)])
    assert places.place([sequence(places.c)], []) == [True]
    assert set(places.adapters._slots) == {places.a, places.c}


def test_an_adapter_of_earlier_waiting_sequences_is_kept(tmp_path: Path) -> None:
    places = Places(tmp_path, max_loras=1)
    assert places.place([sequence(places.a), sequence(places.b)], []) == [True, False]
    assert places.place([sequence(places.a), sequence(places.b)], []) == [True, False]


def test_a_busy_adapter_gives_way_to_one_that_waits(tmp_path: Path) -> None:
    """Others may go on: only one of the busy ones has to end."""
    places = Places(tmp_path, max_loras=2)
    running = [sequence(places.a), sequence(places.a), sequence(places.b)]
    assert places.place(running, []) == [True, True, True]
    waiting = [sequence(places.b), sequence(places.c), sequence(places.b), sequence(places.a)]
    assert places.place(waiting, running) == [True, False, False, True]
    assert places.place([waiting[1], waiting[3]], running[:2]) == [True, True]


@pytest.mark.long
def test_requests_whose_adapter_is_broken_end_with_its_error_and_others_go_on(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llava", tmp_path / "model")
    whole = whole_class("llava").from_pretrained(checkpoint).eval()
    request = small_requests("llava", whole)[0]
    good = LoraRequest("good", str(save_adapter(tmp_path / "good", whole, seed=1)))
    broken = LoraRequest("broken", str(save_adapter(tmp_path / "broken", whole, seed=1, use_dora=True)))
    engine = LLMEngine(EngineConfig(checkpoint, kv_cache_bytes=2**22, max_loras=1))
    for _ in range(2):
        for name, lora in {"good": good, "broken": broken, "base": None}.items():
            engine.add_request(name, request.prompt, request.embeddings, PARAMS, lora=lora)
        ends: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            ends |= {one.request_id: one for one in engine.step() if one.finish_reason is not None}
        assert isinstance(ends["broken"].error, LoraError)
        assert "adapter 'broken'" in str(ends["broken"].error)
        assert [ends[name].error for name in ("good", "base")] == [None, None]
        engine.check_integrity()


def test_an_idle_engine_wakes_for_an_adapter(tmp_path: Path) -> None:
    import threading

    checkpoint = make_checkpoint("llava", tmp_path / "model")
    whole = whole_class("llava").from_pretrained(checkpoint).eval()
    request = small_requests("llava", whole)[0]
    lora = LoraRequest("own", str(save_adapter(tmp_path / "own", whole, seed=1)))
    engine = LLMEngine(EngineConfig(checkpoint, kv_cache_bytes=2**22, max_loras=1))
    is_read = threading.Event()
    engine.call_when_adapter_read(is_read.set)
    engine.add_request("r", request.prompt, request.embeddings, PARAMS, lora=lora)
    assert engine.step() == []
    assert is_read.wait(10)
    assert not engine.is_idle
    assert engine.step()


def test_without_places_no_adapter_is_taken(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llava", tmp_path)
    request = small_requests("llava", whole_class("llava").from_pretrained(checkpoint).eval())[0]
    engine = LLMEngine(EngineConfig(checkpoint, kv_cache_bytes=2**22))
    with pytest.raises(ValueError, match="max_loras is 0"):
        engine.add_request("r", request.prompt, request.embeddings, PARAMS, lora=LoraRequest("a", "/a"))
    assert not engine.has_unfinished()


def test_several_ranks_serve_none() -> None:
    group: Any = object()
    with pytest.raises(ValueError, match="max_loras: a model divided among ranks serves no adapters"):
        LLMEngine(EngineConfig("model", max_loras=1), group)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_deltas_are_added_to_whatever_layer_there_is(tmp_path: Path, quantization: Any) -> None:
    checkpoint = make_checkpoint("llava", tmp_path / "model")
    whole = whole_class("llava").from_pretrained(checkpoint).eval()
    folder = save_adapter(tmp_path / "own", whole, seed=1)
    settings: Any = {"kv_cache_bytes": 2**22, "max_loras": 2, "quantization": quantization}
    layers = LLMEngine(EngineConfig(checkpoint, **settings))._runner.lora_layers
    assert isinstance(layers, LoraLayers)
    layers.load(1, read_adapter(str(folder), layers.shapes, max_rank=16, dtype=torch.float32))
    stored = load_file(folder / "adapter_model.safetensors")
    with torch.inference_mode(), layers.of(torch.tensor([1, -1, 1])):
        for name, linear in layers._linears.items():
            inputs = torch.randn(3, layers.shapes[name].in_features)
            a, b = (stored[f"{PREFIX}model.language_model.{name}.lora_{half}.weight"] for half in "AB")
            expected = linear.base(inputs) + torch.tensor([[2.0], [0.0], [2.0]]) * (inputs @ a.T @ b.T)
            torch.testing.assert_close(linear(inputs), expected)
            assert torch.equal(linear(inputs)[1], linear.base(inputs)[1])
