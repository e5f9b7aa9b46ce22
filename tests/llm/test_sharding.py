"""A decoder divided among two ranks computes what the whole one does; what cannot be divided is refused."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from raylens.llm.ranks.parallel import ProcessGroup
from raylens.llm.ranks.partition import Partition, joined, replicated_kv, with_padding
from raylens.llm.ranks.sharding import check_shapes, shard
from tests.llm.ranks import on_both, pool_for_rank_one, silent_rank

SMALL = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "no_gqa": ("mistral", {"num_key_value_heads": 4}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "norm_of_each_head": ("qwen3", {}),
    "scaled_embedding": ("gemma3_text", {"tie_word_embeddings": True, "sliding_window": 4}),
    "fused_projections": ("phi3", {}),
    "norm_over_all_heads": ("olmo2", {}),
    "norm_with_weights_of_each_head": ("cohere", {"use_qk_norm": True, "logit_scale": 1.0}),
    "learned_positions": ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 96, "max_position_embeddings": 64}),
    "queries_keys_and_values_in_one": ("persimmon", {"num_key_value_heads": 4}),
    "experts": ("mixtral", EXPERTS),
    "many_experts": ("qwen3_moe", EXPERTS),
}


def small_model(model_type: str, settings: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**SMALL, **settings})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def random_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = small_model(*MODELS[name])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def logits_and_bytes(group: ProcessGroup | None, name: str) -> tuple[torch.Tensor, int]:
    """Logits of the model, divided in `group`, and how many bytes its weights take on this rank."""
    model = random_model(name)
    if group is not None:
        shard(model, model.model, group)
    token_ids = torch.randint(0, SMALL["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = model(input_ids=token_ids).logits
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return logits, sum(storages.values())


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with pool_for_rank_one() as pool:
        yield pool


@pytest.mark.parametrize("name", MODELS)
def test_both_ranks_compute_the_logits_of_the_whole(pool: ProcessPoolExecutor, name: str) -> None:
    expected, whole_bytes = logits_and_bytes(None, name)
    assert expected.std() > 0.1
    for logits, num_bytes in on_both(pool, logits_and_bytes, name):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        # Routers and norms are whole; with a single key head, that is, too.
        assert num_bytes < 0.57 * whole_bytes


def test_a_tied_head_takes_no_memory_of_its_own() -> None:
    model = random_model("tied")
    shard(model, model.model, silent_rank(0, 2))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("model_type", "settings", "world_size", "message"),
    [
        ("llama", {}, 3, r"self_attn.q_proj: 4 attention heads cannot be divided by 3 ranks"),
        ("llama", {"hidden_size": 96, "num_attention_heads": 6}, 3, r"2 key/value heads .* by 3 ranks"),
        ("llama", {"intermediate_size": 98}, 4, r"mlp.gate_proj: 98 cannot be divided by 4 ranks"),
        ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 30}, 4, r"mlp.experts: 30 cannot be divided by 4 ranks"),
        ("qwen2_moe", EXPERTS, 2, r"shared_expert.*would be whole on every rank: the model's plan"),
        ("deepseek_v3", {"num_key_value_heads": 4}, 2, r"q_a_proj.*would be whole on every rank: the model's plan"),
        ("gpt_oss", EXPERTS, 2, r"sinks \(4,\) stands beside weights divided"),
    ],
)
def test_what_does_not_divide_is_refused(
    model_type: str, settings: dict[str, Any], world_size: int, message: str
) -> None:
    with torch.device("meta"):
        model = small_model(model_type, settings)
    before = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    with pytest.raises(ValueError, match=message):
        shard(model, model.model, silent_rank(0, world_size))
    assert [(name, parameter.shape) for name, parameter in model.named_parameters()] == before


def test_a_plan_that_names_nothing_of_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers itself would then divide the head alone, and say nothing."""
    model = random_model("llama")
    monkeypatch.setattr(type(model.config), "base_model_tp_plan", {"blocks.*.q_proj": "colwise"})
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.weight \(64, 64\) would be whole"):
        shard(model, model.model, silent_rank(0, 2))


def test_a_configuration_without_a_plan_goes_by_llamas_names(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("norm_of_each_head")
    monkeypatch.setattr(type(model.config), "base_model_tp_plan", None)
    shard(model, model.model, silent_rank(0, 2))
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (32, 64)


def test_a_weight_that_did_not_shrink_is_noticed() -> None:
    layer = torch.nn.Linear(8, 6)
    check_shapes(layer, {"weight": Partition(-2, 12, ((0, 6),))})
    with pytest.raises(ValueError, match=r"weight has 6 on dimension -2, its rank should hold 3"):
        check_shapes(layer, {"weight": Partition(-2, 6, ((0, 3),))})


@pytest.mark.parametrize("size", [1, 5, 8, 131])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_padded_parts_are_equal_and_make_the_whole(size: int, world_size: int) -> None:
    table = torch.randn(size, 3)
    parts = [with_padding(size, -2, rank, world_size).take(table) for rank in range(world_size)]
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(torch.cat(parts)[:size], table)
    assert not torch.cat(parts)[size:].any()


@pytest.mark.parametrize(
    ("num_kv_heads", "world_size", "heads"),
    [(4, 2, [[0, 1], [2, 3]]), (2, 2, [[0], [1]]), (2, 4, [[0], [0], [1], [1]]), (1, 2, [[0], [0]])],
)
def test_ranks_have_the_key_heads_of_their_query_heads(
    num_kv_heads: int, world_size: int, heads: list[list[int]]
) -> None:
    rows = torch.arange(num_kv_heads).repeat_interleave(8).unsqueeze(1)
    parts = [replicated_kv("k", num_kv_heads, 8, rank, world_size).take(rows) for rank in range(world_size)]
    assert [sorted(set(part.flatten().tolist())) for part in parts] == heads
    assert all(len(part) == 8 * len(own) for part, own in zip(parts, heads, strict=True))


def test_one_half_of_a_packed_weight_may_be_stored_alone() -> None:
    gate_up = joined([Partition(-2, 6, ((2, 4),))] * 2)
    weight = torch.arange(12).unsqueeze(1)
    assert gate_up.of_shape((12, 1)).take(weight).flatten().tolist() == [2, 3, 8, 9]
    assert gate_up.of_shape((6, 1)).take(weight[:6]).flatten().tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"shape \(7, 1\) is stored, 12 on dimension -2"):
        gate_up.of_shape((7, 1))
