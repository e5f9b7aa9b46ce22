"""Packs the weights of a language half on the CPU (`modeling/packed_linear.py`)."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from raylens.llm.attention_variants.indexers import is_outside_indexers
from raylens.llm.config import EngineConfig
from raylens.llm.loader import computing_dtype
from raylens.llm.models.family import LanguageFamily
from raylens.modeling.packed_linear import Precision, has_kernel_layers, pack_linear_layers, packable_dtypes
from raylens.modeling.submodules import submodules


def pack_language_half(
    config: EngineConfig, model: PreTrainedModel, family: LanguageFamily, *, is_divided: bool
) -> None:
    """Replaces linear layers and embeddings of the model, in place, except for those of indexers. The embeddings of a
    model that is divided among ranks stay: each rank has some of their rows.

    Raises ValueError for a quantization without Raylens' kernels."""
    dtype = computing_dtype(config)
    if dtype not in packable_dtypes() and config.quantization is None:
        return
    decoder = family.find_decoder(model)
    in_decoder = {id(module) for module in decoder.modules()}
    quantizable = {name for name, module in submodules(model) if id(module) in in_decoder and not _is_router(name)}
    head = model.get_output_embeddings()
    heads = {name for name, module in submodules(model) if module is head}

    def precision_of(name: str) -> Precision | None:
        if config.quantization and name in heads | embeddings.keys():
            return "int8"  # wrong logits cost more than the few bytes
        if config.quantization and name in quantizable:
            return config.quantization
        return None if config.dtype == "float32" or not has_kernel_layers(dtype) else config.dtype

    def is_exact(name: str) -> bool:
        return config.exact or name in heads or _is_router(name) or _feeds_a_state(name)

    embeddings = dict(_embeddings(model)) if has_kernel_layers(dtype) and not is_divided else {}
    pack_linear_layers(model, dtype, is_outside_indexers, precision_of, is_exact, embeddings)


def _is_router(name: str) -> bool:
    """Returns whether a layer chooses experts, by which few bits would choose other ones."""
    return name.rpartition(".")[2] in ("gate", "router")


def _feeds_a_state(name: str) -> bool:
    """Returns whether a layer writes to a recurrent state, in which the roundings of a whole prompt would add up."""
    return name.rpartition(".")[2].startswith("in_proj")


def _embeddings(model: PreTrainedModel) -> list[tuple[str, float]]:
    """Returns the embeddings of tokens, by name, with the factor of their rows."""
    found: list[tuple[str, float]] = []
    for name, module in submodules(model):
        own: Any = module
        if type(module) is nn.Embedding and module is model.get_input_embeddings():
            found.append((name, 1.0))
        elif type(module).__name__.endswith("TextScaledWordEmbedding"):  # of a Gemma
            found.append((name, float(own.embed_scale)))
    return found
