"""Pictures packed on one axis attend each to itself alone, by one kernel or one after another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from raylens.encoder import packed_attention as module
from raylens.encoder.config import EncoderConfig, PartConfig
from raylens.encoder.loader import load_vision_half
from raylens.encoder.models.mistral3 import _groups
from raylens.encoder.packed_attention import packed_attention
from raylens.modeling.families import known_to, load_family
from raylens.modeling.varlen_attention import has_kernel
from tests.encoder.small_vision import Small, make_small
from tests.small_models import make_checkpoint, whole_class

LENGTHS = [5, 1, 12, 3]
NUM_HEADS, HEAD_DIM, SCALING = 2, 8, 0.3


@pytest.fixture(scope="module", params=[name for name in known_to("encoder") if load_family("encoder", name).is_packed])
def packing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small(request.param, tmp_path_factory.mktemp("model"))


def packed(dtype: torch.dtype = torch.float32, device: str = "cpu", head_dim: int = HEAD_DIM) -> list[torch.Tensor]:
    """Queries, keys and values, laid out as the towers have them."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, sum(LENGTHS), NUM_HEADS, head_dim, generator=generator).to(device, dtype)
    return [part.transpose(0, 1).unsqueeze(0) for part in whole]


def attend(tensors: list[torch.Tensor], *, by_kernels: bool = False) -> torch.Tensor:
    queries, keys, values = tensors
    bounds = torch.tensor([0, *LENGTHS], device=queries.device).cumsum(0, dtype=torch.int32)
    lengths: dict[str, Any] = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 12, "max_length_k": 12}
    options: dict[str, Any] = {"scaling": SCALING, "by_kernels": by_kernels, "dropout": 0.0, **lengths}
    output, _ = packed_attention(nn.Module(), queries, keys, values, None, **options)
    return output


def one_by_one(tensors: list[torch.Tensor]) -> torch.Tensor:
    splits = [torch.split(tensor, LENGTHS, dim=2) for tensor in tensors]
    options: dict[str, Any] = {"attention_mask": None, "scaling": SCALING, "is_causal": False}
    outputs = [sdpa_attention_forward(nn.Module(), *own, **options)[0] for own in zip(*splits, strict=True)]
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_picture_attends_as_if_it_were_alone(dtype: torch.dtype) -> None:
    tensors = packed(dtype)
    assert not has_kernel(tensors[0])
    assert torch.equal(attend(tensors), one_by_one(tensors))


def test_raylens_kernels_attend_the_same() -> None:
    tensors = packed()
    torch.testing.assert_close(attend(tensors, by_kernels=True), one_by_one(tensors))


def test_the_kernel_gets_all_pictures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for it, with its arguments and shapes."""

    def kernel(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *lengths: Any, scale: float
    ) -> torch.Tensor:
        starts, key_starts, longest, longest_key = lengths
        assert starts.tolist() == key_starts.tolist() == [0, 5, 6, 18, 21]
        assert longest == longest_key == 12
        assert query.shape == (sum(LENGTHS), NUM_HEADS, HEAD_DIM)
        assert scale == SCALING
        return one_by_one([tensor.transpose(0, 1)[None] for tensor in (query, key, value)])[0]

    monkeypatch.setattr(module, "has_kernel", lambda query: True)
    monkeypatch.setattr(module, "varlen_attn", kernel)
    tensors = packed()
    assert torch.equal(attend(tensors), one_by_one(tensors))


@pytest.mark.parametrize("by_kernels", [False, True])
def test_a_mask_is_refused(by_kernels: bool) -> None:
    bounds = torch.tensor([0, 21], dtype=torch.int32)
    queries, keys, values = packed()
    with pytest.raises(ValueError, match="no mask"):
        packed_attention(
            nn.Module(),
            queries,
            keys,
            values,
            torch.zeros(21, 21),
            cu_seq_lens_q=bounds,
            max_length_q=21,
            scaling=SCALING,
            by_kernels=by_kernels,
        )


def test_a_tower_calls_attention_once_a_layer_whatever_is_in_a_batch(
    packing: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(module, "has_kernel", lambda query: calls.append(query.shape[2]))
    half, _ = load_vision_half(EncoderConfig(packing.checkpoint))
    prompt = next(prompt for prompt in packing.prompts if len(prompt.items) > 1)
    modality, items = packing.modality(prompt), prompt.tensors[:1] * 3
    with torch.inference_mode():
        modality.encode(half, items)
    assert calls == attended(half.config, sum(modality.num_patches(half.config, item) for item in items))


def attended(config: Any, num_patches: int) -> list[int]:
    """How many patches each layer attends over."""
    num_layers = getattr(config.vision_config, "depth", None) or config.vision_config.num_hidden_layers
    if config.model_type not in ("minicpmv4_6", "minicpmv4_7"):
        return [num_patches] * num_layers
    # Between two of its layers squares of four patches attend to themselves and are merged.
    num_before = config.insert_layer_id + 1
    return [num_patches] * (num_before + 1) + [num_patches // 4] * (num_layers - num_before)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_patches_lie_is_what_the_tower_would_work_out(
    tmp_path: Path, model_type: str, dtype: torch.dtype
) -> None:
    checkpoint = make_checkpoint(model_type, tmp_path)
    part = PartConfig(dtype=dtype)
    half, family = load_vision_half(EncoderConfig(checkpoint, tower=part, projector=part))
    whole = whole_class(model_type).from_pretrained(checkpoint, dtype=dtype).eval()
    config = half.config.vision_config
    grids = torch.tensor([[1, 8, 12], [1, 4, 4], [1, 10, 6]])
    width = 3 * config.patch_size**2
    rows = [torch.randn(int(grid.prod()), width, generator=torch.Generator().manual_seed(0)) for grid in grids]
    items = [{"pixel_values": own, "image_grid_thw": grid} for own, grid in zip(rows, grids, strict=True)]
    frames = torch.cat(rows).view(-1, 3, 1, width // 3).expand(-1, -1, config.temporal_patch_size, -1).flatten(1)
    with torch.inference_mode():
        found = family.modalities["image"].encode(half, items)
        outputs = whole.get_image_features(pixel_values=frames, image_grid_thw=grids)
    levels = [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or ())]
    for own, expected in zip(found, zip(*levels, strict=True), strict=True):
        assert torch.equal(own, torch.cat(expected, dim=-1))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(28, 28)], [1]),
        ([(28, 28)] * 5, [5]),
        ([(28, 280), (28, 280), (280, 28)], [2, 1]),
        ([(280, 280), (28, 28)], [2]),
        ([(280, 280), (28, 28), (28, 28)], [2, 1]),
    ],
)
def test_pictures_are_padded_to_no_more_than_twice_their_size(
    sizes: list[tuple[int, int]], expected: list[int]
) -> None:
    items = [{"pixel_values": torch.empty(3, height, width, device="meta")} for height, width in sizes]
    groups = list(_groups(items))
    assert [len(group) for group in groups] == expected
    assert [id(item) for group in groups for item in group] == [id(item) for item in items]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_the_kernel_agrees_with_float32(dtype: torch.dtype, head_dim: int) -> None:
    tensors = packed(dtype, "cuda", head_dim)
    assert has_kernel(tensors[0])
    expected = one_by_one([tensor.float() for tensor in tensors])
    torch.testing.assert_close(attend(tensors).float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_half_precision_tower_on_the_gpu_is_near_float32_on_the_cpu(packing: Small) -> None:
    part = PartConfig(torch.bfloat16, "cuda")
    half, _ = load_vision_half(EncoderConfig(packing.checkpoint, tower=part, projector=part))
    for prompt in packing.prompts:
        modality = packing.modality(prompt)
        items = [
            {name: value if name in modality.on_host else value.cuda() for name, value in item.items()}
            for item in prompt.tensors
        ]
        with torch.inference_mode():
            found = modality.encode(half, items)
        for own, expected in zip(found, prompt.expected, strict=True):
            assert (own.cpu().float() - expected).norm() < 0.1 * expected.norm()


@torch.inference_mode()
def test_a_picture_of_one_embedding_is_encoded_alone_as_among_others(tmp_path: Path) -> None:
    """transformers fails at it where it is alone, and so did pictures whose neighbours are much larger."""
    model, family = load_vision_half(EncoderConfig(make_checkpoint("mistral3", tmp_path)))
    encode = family.modalities["image"].encode
    generator = torch.Generator().manual_seed(0)

    def item(height: int, width: int) -> dict[str, torch.Tensor]:
        pixels = torch.randn(3, height, width, generator=generator)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([height, width])}

    tiny, small, large = item(28, 28), item(28, 56), item(112, 112)
    (alone,) = encode(model, [tiny])
    assert alone.shape[0] == 1
    for others in ([small], [large], [small, large, tiny]):
        found = encode(model, [tiny, *others])
        assert [len(one) for one in found[1:]] == [len(encode(model, [one])[0]) for one in others]
        torch.testing.assert_close(found[0], alone)
