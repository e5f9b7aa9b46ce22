"""An engine with the language half of a LLaVA of 7 or 0.5 B parameters, with random weights made on the device."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoProcessor, PreTrainedModel

from benchmarks.gpu_limits import dtype_of
from benchmarks.random_checkpoint import LLAVA_7B
from raylens.checkpoints import BUNDLED_MODEL
from raylens.llm.attention import ATTENTION_NAME, register_paged_attention
from raylens.llm.config import DtypeName, EngineConfig
from raylens.llm.engine import LLMEngine
from raylens.llm.loader import load_language_family
from raylens.llm.models.family import LanguageFamily
from raylens.llm.models.found import with_plain_head
from raylens.llm.ranks.parallel import ProcessGroup

_HALF_BILLION = LLAVA_7B | {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 768,
    "max_position_embeddings": 1024,
}
_MEMORY_SHARE = 0.8
"""Share of a GPU for weights and KV cache; activations and graphs use the rest."""
_DTYPE_NAMES: dict[torch.dtype, DtypeName] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Shape:
    """A language model and its load. `batches`: numbers of sequences that decode together."""

    text: dict[str, int]
    dtype: torch.dtype
    batches: tuple[int, ...]
    batch_positions: int
    """Total prompt positions of a batch; each prompt has at most `prompt_tokens`."""
    prompt_tokens: int
    new_tokens: int
    long_prompt_tokens: int

    @classmethod
    def of(cls, device: torch.device, *, small: bool = False, tiny: bool) -> "Shape":
        """Returns the shape of a model of 7 B parameters, with the batches whose KV cache fits into the device's
        memory. `small`: 0.5 B parameters and one sequence."""
        if tiny:
            return cls(_TINY, dtype_of(device), (1,) if small else (1, 4), 256, 32, 8, 128)
        if small:
            return cls(_HALF_BILLION, dtype_of(device), (1,), 512, 512, 32, 1024)
        full = cls(LLAVA_7B, dtype_of(device), (1, 8, 64, 256), 2**15, 512, 64, 4096)
        if device.type == "cpu":
            return full
        room = torch.cuda.mem_get_info(device)[1] * _MEMORY_SHARE - full.num_weights * full.dtype.itemsize
        fitting = tuple(one for one in full.batches if full.num_positions(one) * full.position_bytes <= room)
        return replace(full, batches=fitting)

    def prompt_length(self, batch: int) -> int:
        return min(self.prompt_tokens, self.batch_positions // batch)

    def num_positions(self, batch: int) -> int:
        """Returns the final KV cache positions of a batch."""
        return batch * (self.prompt_length(batch) + self.new_tokens)

    @property
    def position_bytes(self) -> int:
        """Returns the bytes of keys and values of one position, over all layers."""
        numbers = 2 * self.text["num_hidden_layers"] * self.text["num_key_value_heads"] * self.text["head_dim"]
        return numbers * self.dtype.itemsize

    @property
    def num_weights(self) -> int:
        hidden = self.text["hidden_size"]
        layer = 4 * hidden**2 + 3 * hidden * self.text["intermediate_size"]
        return self.text["num_hidden_layers"] * layer + 2 * self.num_head_weights

    @property
    def num_multiplied(self) -> int:
        """Returns the number of weights multiplied per decoded token: all but the embeddings, of which a step reads a
        few rows."""
        return self.num_weights - self.num_head_weights

    @property
    def num_head_weights(self) -> int:
        return self.text["vocab_size"] * self.text["hidden_size"]


def make_engine(shape: Shape, device: torch.device) -> LLMEngine:
    """Returns an engine whose cache fits the largest batch, and two long prompts. Steps have the engine's default
    size."""
    num_tokens = max(*map(shape.num_positions, shape.batches), 2 * shape.long_prompt_tokens)
    with tempfile.TemporaryDirectory() as folder, patch("raylens.llm.model_runner.load_language_half", _random_half):
        _save_settings(shape, Path(folder))
        return LLMEngine(
            EngineConfig(
                folder,
                dtype=_DTYPE_NAMES[shape.dtype],
                device=str(device),
                kv_cache_bytes=(num_tokens + 16 * max(shape.batches)) * shape.position_bytes,
                max_num_seqs=max(shape.batches),
                prefix_caching=False,
                prompt_lookup=False,
            )
        )


def _save_settings(shape: Shape, folder: Path) -> None:
    """Writes a checkpoint without weights."""
    config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    for name, value in shape.text.items():
        setattr(config.text_config, name, value)
    config.text_config.tie_word_embeddings = config.tie_word_embeddings = False
    config.save_pretrained(folder)
    AutoProcessor.from_pretrained(BUNDLED_MODEL).save_pretrained(folder)


@torch.no_grad()
def _random_half(
    config: EngineConfig, group: ProcessGroup | None, pack: Callable[[PreTrainedModel, LanguageFamily], None]
) -> tuple[PreTrainedModel, LanguageFamily]:
    """Stands in for `load_language_half`. The weights' spread preserves the size of hidden states."""
    register_paged_attention()
    hf_config = AutoConfig.from_pretrained(config.model)
    family = load_language_family(hf_config)
    with torch.device(config.device):
        half = family.model_class._from_config(
            hf_config, dtype=getattr(torch, config.dtype), attn_implementation={"text_config": ATTENTION_NAME}
        )
    generator = torch.Generator(config.device).manual_seed(0)
    for parameter in half.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
    if config.device == "cpu":
        pack(half, family)
    return half.eval().requires_grad_(False), with_plain_head(family, half)
