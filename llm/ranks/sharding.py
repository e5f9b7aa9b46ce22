"""Divides a decoder, its embedding and its head among ranks, by transformers' plan for the model.

A column-parallel layer keeps its outputs on the rank, and the next, row-parallel layer sums over all ranks. Each
attention head and each column of an MLP is thus computed on the rank with its weights."""

import re
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from raylens.llm.ranks.parallel import ProcessGroup
from raylens.llm.ranks.partition import Partition, even, joined, replicated_kv, with_padding
from raylens.llm.ranks.sharded_layers import GatheredLinear, RowParallelLinear, linear_of, shard_embedding

_LLAMA_PLAN = {
    **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "layers.*.self_attn.o_proj": "rowwise",
    **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    "layers.*.mlp.down_proj": "rowwise",
}
_INTERNLM2_COLUMNS = ("attention.wqkv", "feed_forward.w1", "feed_forward.w3")
_INTERNLM2_ROWS = ("attention.wo", "feed_forward.w2")
# Plans by model type, for configurations without one. Other types without a plan (qwen3_vl's text) get Llama's. A model
# with layers outside its plan is rejected.
_PLANS = {
    "internlm2": {
        **{f"layers.*.{name}": "colwise" for name in _INTERNLM2_COLUMNS},
        **{f"layers.*.{name}": "rowwise" for name in _INTERNLM2_ROWS},
        # A LoRA's first layer has the input of its linear layer, and its second layer has the output.
        **{f"layers.*.{name}_plora_a": "replicate" for name in _INTERNLM2_COLUMNS},
        **{f"layers.*.{name}_plora_b": "colwise" for name in _INTERNLM2_COLUMNS},
        **{f"layers.*.{name}_plora_a": "rowwise" for name in _INTERNLM2_ROWS},
        **{f"layers.*.{name}_plora_b": "replicate" for name in _INTERNLM2_ROWS},
    },
    "opt": {
        **{f"decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
        "decoder.layers.*.self_attn_layer_norm": "replicate",
        "decoder.layers.*.final_layer_norm": "replicate",
        "decoder.embed_positions": "replicate",
    },
    "persimmon": {
        "layers.*.self_attn.query_key_value": "colwise",  # head by head
        "layers.*.self_attn.dense": "rowwise",
        "layers.*.mlp.dense_h_to_4h": "colwise",
        "layers.*.mlp.dense_4h_to_h": "rowwise",
    },
}
# Modules that are whole on every rank, against the plan. Gemma 3n's MLPs select activations by mean and standard
# deviation over all columns.
_WHOLE = {
    "gemma3n_text": (
        "altup_projections.*",
        "altup_unembed_projections.*",
        "embed_tokens_per_layer",
        "per_layer_model_projection",
        *(f"layers.*.altup.{name}" for name in ("correction_coefs", "modality_router", "prediction_coefs")),
        *(f"layers.*.laurel.linear_{name}" for name in ("left", "right")),
        *(f"layers.*.mlp.{name}_proj" for name in ("down", "gate", "up")),
        "layers.*.per_layer_input_gate",
        "layers.*.per_layer_projection",
    )
}
# The projections of query heads, with the unit in head_dim by which their rows are divided: a query head, a query head
# with its key and value, or a key-value head with all its query heads.
_QUERIES: dict[str, Callable[[Any], int]] = {
    "q_proj": lambda attention: 1,
    "query_key_value": lambda attention: 3,
    "wqkv": lambda attention: attention.num_key_value_groups + 2,
    "wqkv_plora_b": lambda attention: attention.num_key_value_groups + 2,
}
_REPLICATED = ("replicated_with_grad_allreduce", "replicate")
# Small layers that choose experts. They stay whole, because every rank needs all outputs.
_ROUTERS = ("gate", "router")


def shard(model: PreTrainedModel, decoder: nn.Module, group: ProcessGroup) -> dict[str, Partition]:
    """Replaces the layers of `decoder` (a part of `model`), the embedding and the head by this rank's part of them.
    Returns this rank's part of each divided weight, by parameter name. The weights may be on the meta device.

    Raises ValueError, before any change, for sizes that the number of ranks does not divide, for indivisible layers,
    and for a weight that no rule covers."""
    prefix = next(name for name, module in model.named_modules() if module is decoder) + "."
    plan = {prefix + name: style for name, style in _plan(decoder.config).items()}
    planned = {name: style for name, _ in model.named_modules() if (style := plan.get(_in_plan(name))) is not None}
    divided = [(name, model.get_submodule(name), style) for name, style in planned.items() if style not in _REPLICATED]
    partitions = _vocabulary_partitions(model, group)
    for name, module, style in divided:
        if isinstance(module, nn.Linear):
            partitions |= _linear_partitions(model, name, module, style, group)
        elif style == "moe_tp_experts":
            partitions |= _expert_partitions(name, module, plan, group)
        else:
            raise ValueError(f"{name}: a {type(module).__name__} of style {style} cannot be divided among ranks")
    head_norms = _head_norm_partitions(model, partitions)
    partitions |= head_norms
    _check_covered(model, prefix, planned, partitions)
    for name, module, style in divided:
        if isinstance(module, nn.Linear):
            _replace(model, name, _sharded_linear(module, name, style, partitions, group))
            if style == "colwise":
                _count_heads(model, name, partitions, group.world_size)
        else:
            for leaf in ("gate_up_proj", "down_proj"):
                _shard_parameter(module, leaf, partitions[f"{name}.{leaf}"])
            module.register_forward_hook(lambda module, args, output: group.all_reduce(output))
    for name in head_norms:
        owner, _, leaf = name.rpartition(".")
        _shard_parameter(model.get_submodule(owner), leaf, partitions[name])
    _shard_vocabulary(model, partitions, group)
    check_shapes(model, partitions)
    return partitions


def check_shapes(model: nn.Module, partitions: dict[str, Partition]) -> None:
    """Raises ValueError for a weight whose size differs from its partition's."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, partition in partitions.items():
        size = parameters[name].shape[partition.dim]
        if size != partition.length:
            raise ValueError(f"{name} has {size} on dimension {partition.dim}, its rank should hold {partition.length}")


def _plan(config: PreTrainedConfig) -> dict[str, str]:
    plan = config.base_model_tp_plan or _PLANS.get(config.model_type, _LLAMA_PLAN)
    return {**plan, **dict.fromkeys(_WHOLE.get(config.model_type, ()), "replicate")}


def _in_plan(name: str) -> str:
    """Returns a module's name as in plans: with `*` for the numbers of layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _linear_partitions(
    model: nn.Module, name: str, linear: nn.Linear, style: str, group: ProcessGroup
) -> dict[str, Partition]:
    if type(linear) is not nn.Linear:
        raise ValueError(f"{name}: a {type(linear).__name__} cannot be divided among ranks")
    match style:
        case "colwise":
            rows = _output_partition(name, linear, model.get_submodule(name.rpartition(".")[0]), group)
        case "colwise_gather_output":
            rows = with_padding(linear.out_features, -2, group.rank, group.world_size)
        case "rowwise" | "rowwise_split_input":
            return {f"{name}.weight": even(name, linear.in_features, -1, group.rank, group.world_size)}
        case _:
            raise ValueError(f"{name}: style {style} of tensor parallelism is not supported")
    partitions = {f"{name}.weight": rows}
    if linear.bias is not None:
        partitions[f"{name}.bias"] = rows.on(-1)
    return partitions


def _output_partition(name: str, linear: nn.Linear, parent: nn.Module, group: ProcessGroup) -> Partition:
    """Returns this rank's rows of a column-parallel layer: in attention, those of its query heads and of their key and
    value heads."""
    head_dim = getattr(parent, "head_dim", None)
    leaf = name.rpartition(".")[2]
    if leaf not in (*_QUERIES, "k_proj", "v_proj") or not isinstance(head_dim, int):
        return even(name, linear.out_features, -2, group.rank, group.world_size)
    head_size = (_QUERIES[leaf](parent) if leaf in _QUERIES else 1) * head_dim
    num_heads, rest = divmod(linear.out_features, head_size)
    if rest:
        raise ValueError(f"{name}: {linear.out_features} outputs are not a multiple of head_dim {head_size}")
    if leaf not in _QUERIES:
        return replicated_kv(name, num_heads, head_dim, group.rank, group.world_size)
    if num_heads % group.world_size:
        raise ValueError(f"{name}: {num_heads} attention heads cannot be divided by {group.world_size} ranks")
    return even(name, linear.out_features, -2, group.rank, group.world_size)


# By the styles of gate_up_proj and down_proj: the dimension by which each is divided.
_EXPERT_DIMS = {("packed_colwise", "rowwise"): (-2, -1), ("packed_rowwise", "colwise"): (-1, -2)}


def _expert_partitions(
    name: str, experts: nn.Module, plan: dict[str, str], group: ProcessGroup
) -> dict[str, Partition]:
    """Returns this rank's columns of every expert. Weights are (experts, gate and up columns, in) and (experts, out,
    columns), or both with the last two dimensions transposed."""
    styles = {leaf: plan.get(_in_plan(f"{name}.{leaf}")) for leaf, _ in experts.named_parameters()}
    shapes = {leaf: tuple(parameter.shape) for leaf, parameter in experts.named_parameters()}
    dims = _EXPERT_DIMS.get((styles.get("gate_up_proj") or "", styles.get("down_proj") or ""))
    if len(styles) != 2 or dims is None or shapes["gate_up_proj"][dims[0]] != 2 * shapes["down_proj"][dims[1]]:
        raise ValueError(f"{name}: experts with {shapes} of styles {styles} cannot be divided among ranks")
    columns = even(name, shapes["down_proj"][dims[1]], dims[1], group.rank, group.world_size)
    return {f"{name}.down_proj": columns, f"{name}.gate_up_proj": joined([columns, columns]).on(dims[0])}


def _head_norm_partitions(model: nn.Module, partitions: dict[str, Partition]) -> dict[str, Partition]:
    """Returns the rows of this rank's heads in query and key norms with a row for each head."""
    found = {}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        attention, _, norm = owner.rpartition(".")
        heads = partitions.get(f"{attention}.{norm.removesuffix('_norm')}_proj.weight")
        if norm in ("q_norm", "k_norm") and heads is not None and parameter.ndim == 2:
            ranges = tuple((first // parameter.shape[1], last // parameter.shape[1]) for first, last in heads.ranges)
            found[name] = Partition(-2, heads.full // parameter.shape[1], ranges)
    return found


def _vocabulary_partitions(model: PreTrainedModel, group: ProcessGroup) -> dict[str, Partition]:
    partitions = {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if module is not None and any(parameter is own for own in module.parameters()):
                dim = -min(parameter.ndim, 2)
                partitions[name] = with_padding(parameter.shape[0], dim, group.rank, group.world_size)
    return partitions


def _check_covered(model: nn.Module, prefix: str, planned: dict[str, str], partitions: dict[str, Partition]) -> None:
    """Raises ValueError for a weight that the plan does not name, which would silently be whole on every rank, and for
    an indivisible weight beside divided ones."""
    # A weight beside a divided projection, such as a norm over all heads, would see only a part of the outputs.
    parents = {name.rpartition(".")[0] for name, style in planned.items() if style == "colwise"}
    row_biases = {f"{name}.bias" for name, style in planned.items() if style.startswith("rowwise")}
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        is_replicated = planned.get(owner) in _REPLICATED or owner.rpartition(".")[2] in _ROUTERS
        if name in partitions or name in row_biases or is_replicated:
            continue
        shape = tuple(parameter.shape)
        parent = next((parent for parent in parents if name.startswith(parent + ".")), None)
        if parent is not None and shape != (getattr(model.get_submodule(parent), "head_dim", None),):
            raise ValueError(f"{name} {shape} stands beside weights divided among ranks and cannot be divided itself")
        if parameter.ndim > 1 and name.startswith(prefix):
            raise ValueError(f"{name} {shape} would be whole on every rank: the model's plan does not name it")


def _sharded_linear(
    linear: nn.Linear, name: str, style: str, partitions: dict[str, Partition], group: ProcessGroup
) -> nn.Linear:
    weight = partitions[f"{name}.weight"].take(linear.weight.detach())
    bias = None if linear.bias is None else linear.bias.detach()
    if bias is not None and f"{name}.bias" in partitions:
        bias = partitions[f"{name}.bias"].take(bias)
    if style == "colwise":
        return linear_of(nn.Linear, weight, bias)
    if style == "colwise_gather_output":
        gathered = linear_of(GatheredLinear, weight, bias)
        gathered.group, gathered.num_outputs = group, linear.out_features
        return gathered
    row = linear_of(RowParallelLinear, weight, bias)
    row.group, row.split_input = group, style == "rowwise_split_input"
    return row


def _shard_parameter(module: nn.Module, leaf: str, partition: Partition) -> None:
    local = partition.take(module.get_parameter(leaf).detach())
    setattr(module, leaf, nn.Parameter(local, requires_grad=False))


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    parent: Any = model.get_submodule(owner)
    setattr(parent, leaf, layer)


def _count_heads(model: nn.Module, name: str, partitions: dict[str, Partition], world_size: int) -> None:
    """Sets transformers' attributes for an attention layer's numbers of heads to this rank's numbers."""
    attention: Any = model.get_submodule(name.rpartition(".")[0])
    rows, leaf = partitions[f"{name}.weight"], name.rpartition(".")[2]
    if leaf in _QUERIES and hasattr(attention, "num_heads"):
        attention.num_heads = rows.length // (_QUERIES[leaf](attention) * attention.head_dim)
    if leaf == "k_proj" and hasattr(attention, "num_key_value_heads"):
        attention.num_key_value_heads = rows.length // attention.head_dim
    if leaf == "k_proj" and hasattr(attention, "num_key_value_groups"):
        num_heads = rows.full // attention.head_dim * attention.num_key_value_groups
        attention.num_key_value_groups = num_heads // world_size // (rows.length // attention.head_dim)


def _shard_vocabulary(model: PreTrainedModel, partitions: dict[str, Partition], group: ProcessGroup) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    names = {id(module): name for name, module in model.named_modules()}
    rows = partitions[names[id(embedding)] + ".weight"]
    shard_embedding(embedding, rows.take(embedding.weight.detach()), *rows.ranges[0], group)
    if head is not None:
        name = names[id(head)]
        layer = _sharded_linear(head, name, "colwise_gather_output", partitions, group)
        if tied:
            layer.weight = embedding.weight
        _replace(model, name, layer)
