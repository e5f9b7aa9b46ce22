"""What a decoder has besides layers with a KV cache that see all positions or windows."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from raylens.cpu_kernels.library import KernelLibrary
from raylens.llm.attention import AttentionBackend
from raylens.llm.attention_variants.distance_bias import DistanceBiases
from raylens.llm.attention_variants.indexers import Indexers, find_indexers
from raylens.llm.attention_variants.reference_windows import ReferenceWindows
from raylens.llm.config import EngineConfig
from raylens.llm.layer_types import HYBRID, REFERENCE, has_layers, layer_types, num_attention_layers
from raylens.llm.models.family import LanguageFamily
from raylens.llm.states.cross_states import CrossStates
from raylens.llm.states.recurrent_states import RecurrentStates, find_mixers, number_attention_layers
from raylens.llm.step_input import StepInput


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """`states`: of layers without a KV cache, and of short convolutions. `cross`: the states that layers cross-attend
    to. `variant`: what some layers' attention does otherwise. None: the decoder has none."""

    states: RecurrentStates | None
    cross: CrossStates | None
    variant: Indexers | ReferenceWindows | DistanceBiases | None

    @contextmanager
    def of(self, step: StepInput, attention: AttentionBackend) -> Iterator[tuple[dict[str, Any], AttentionBackend]]:
        """Lets forwards within this context compute the chunks of `step`. Yields further inputs of the decoder, and the
        attention that takes the place of `attention`."""
        with ExitStack() as stack:
            if self.states is not None:
                stack.enter_context(self.states.of(step))
            inputs = {} if self.cross is None else stack.enter_context(self.cross.of(step))
            if self.variant is not None:
                own: AbstractContextManager[AttentionBackend] = self.variant.of(step, attention)
                attention = stack.enter_context(own)
            yield inputs, attention


def find_parts(
    model: PreTrainedModel,
    family: LanguageFamily,
    decoder: nn.Module,
    kernels: KernelLibrary | None,
    config: EngineConfig,
) -> DecoderParts:
    """Raises ValueError for settings that the decoder's parts do not support. `kernels`: compute single tokens of
    states where they can. None: without Raylens' kernels."""
    text_config = model.config.get_text_config()
    variant = _find_variant(decoder, text_config, config.block_size)
    states = cross = None
    if mixers := find_mixers(decoder, text_config):
        number_attention_layers(decoder)
        states = RecurrentStates(mixers, kernels)
    if family.cross is not None:
        cross = CrossStates(model, family.cross, decoder)
    if config.max_loras > 0:
        for part, name in (
            (states, "layers with a recurrent state"),
            (cross, "cross attention"),
            (variant, "layers that choose or weigh positions"),
        ):
            if part is not None:
                raise ValueError(f"max_loras: a model with {name} serves no adapters")
    if variant is not None and config.device.startswith("cuda"):
        raise ValueError("device: layers that choose or weigh positions run on the CPU only")
    return DecoderParts(states, cross, variant)


def _find_variant(
    decoder: nn.Module, text_config: Any, block_size: int
) -> Indexers | ReferenceWindows | DistanceBiases | None:
    if indexers := find_indexers(decoder):
        return Indexers(indexers, layer_types(text_config), num_attention_layers(text_config), block_size)
    if has_layers(text_config, REFERENCE):
        return ReferenceWindows(decoder, text_config, block_size)
    if has_layers(text_config, HYBRID):
        return DistanceBiases(decoder, block_size)
    return None
