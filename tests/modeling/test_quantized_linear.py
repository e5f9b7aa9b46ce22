"""Weights of 8 bits: near the whole ones, exactly what they say, in a fraction of the memory."""

from pathlib import Path

import pytest
import torch
from torch import nn

from raylens.llm.config import EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.sampling.params import SamplingParams
from raylens.modeling.quantized_linear import Int8Linear, quantize_linear_layers
from tests.small_models import make_checkpoint, small_requests, whole_class


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (8,), (1, 32), (33,), (2, 40), (0,)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_with_the_weights_it_says(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 130, bias=bias, dtype=dtype)
    layer, inputs = Int8Linear(linear), torch.randn(*shape, 96, dtype=dtype)
    with torch.inference_mode():
        output = layer(inputs)
        expected = nn.functional.linear(inputs.float(), layer.dequantized(torch.float32))
        if linear.bias is not None:
            expected += linear.bias
    assert output.dtype == dtype
    assert output.shape == (*shape, 130)
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("in_features", [7, 40, 675])
def test_rows_of_any_length_are_multiplied(in_features: int) -> None:
    """PyTorch's kernel reads beyond those that are no multiple of 16, to the point of a crash."""
    layer, inputs = Int8Linear(nn.Linear(in_features, 130, bias=False)), torch.randn(18, in_features)
    expected = nn.functional.linear(inputs, layer.dequantized(torch.float32))
    torch.testing.assert_close(layer(inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_lie_in_any_order(dtype: torch.dtype) -> None:
    """As those of a picture whose channels a convolution put first."""
    layer, channels_first = Int8Linear(nn.Linear(96, 130)), torch.randn(96, 18, dtype=dtype)
    assert torch.equal(layer(channels_first.T), layer(channels_first.T.contiguous()))


def test_no_weight_is_further_off_than_half_a_step() -> None:
    linear = nn.Linear(64, 50)
    with torch.no_grad():
        linear.weight[7] = 0.0
        linear.weight[8] *= 1e-6
    steps = linear.weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((Int8Linear(linear).dequantized(torch.float32) - linear.weight).abs() <= steps * 0.501).all()


def test_a_layer_takes_a_quarter_of_the_memory() -> None:
    layer = Int8Linear(nn.Linear(1024, 1024))
    assert sum(value.nbytes for value in vars(layer).values() if isinstance(value, torch.Tensor)) < 1.02 * 2**20


@pytest.mark.long
def test_an_engine_answers_like_generate_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernel, that is in float32 throughout."""
    monkeypatch.setattr("raylens.modeling.quantized_linear.MAX_ROWS_FOR_KERNEL", 0)
    checkpoint = make_checkpoint("llava", tmp_path)
    model = whole_class("llava").from_pretrained(checkpoint, dtype=torch.float32).eval()
    whole = {tuple(request.expected) for request in small_requests("llava", model)}
    layers = model.model.language_model.named_modules()
    for layer in [module for _, module in layers if type(module) is nn.Linear]:
        layer.weight.data = Int8Linear(layer).dequantized(torch.float32)
    requests = small_requests("llava", model)
    assert whole != {tuple(request.expected) for request in requests}, "or the weights are the same"
    engine = LLMEngine(EngineConfig(checkpoint, quantization="int8", kv_cache_bytes=2**22))
    num_tokens = len(requests[0].expected)
    for index, request in enumerate(requests):
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        engine.add_request(str(index), request.prompt, request.embeddings, params)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert [answers[str(index)] for index in range(len(requests))] == [request.expected for request in requests]


def test_what_chooses_experts_stays_whole() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 2)
            self.up_proj = nn.Linear(4, 4)

    block = nn.ModuleDict({"mlp": Block()})
    quantize_linear_layers(block)
    assert [type(module) for module in block["mlp"].children()] == [nn.Linear, Int8Linear]


def test_other_ways_are_refused() -> None:
    with pytest.raises(ValueError, match=r"quantization\n  Input should be 'int8'"):
        EngineConfig("model", quantization="int3")  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_is_refused_with_what_to_take_instead(device: str) -> None:
    with pytest.raises(ValueError, match="quantization: int8 weights are for the CPU.*bfloat16.*float8_e4m3fn"):
        EngineConfig("model", quantization="int8", device=device)
    EngineConfig("model", quantization="int8")
    EngineConfig("model", device=device)
