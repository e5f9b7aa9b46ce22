"""A LLaVA checkpoint of random weights, of a size at which the weights do not fit into a processor's caches."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoProcessor, LlavaForConditionalGeneration, PreTrainedTokenizerBase

from checkpoints import BUNDLED_MODEL

TEXT_CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
}


def make_checkpoint(folder: Path) -> int:
    """Writes the checkpoint and the bundled model's processor to `folder`. Returns how many parameters the language
    half has, about 40 million.

    The weights are spread out so that answers depend on the prompt. Each token of an answer is visible text, so that
    a client sees when it comes.
    """
    config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    for name, value in TEXT_CONFIG.items():
        setattr(config.text_config, name, value)
    config.tie_word_embeddings = False
    processor = AutoProcessor.from_pretrained(BUNDLED_MODEL)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.5 if "embed_tokens" in name else 0.05)
    with torch.no_grad():
        model.lm_head.weight[~_is_visible(processor.tokenizer, model.lm_head.out_features)] = 0.0
    model.save_pretrained(folder)
    _name_as_published(folder / "model.safetensors")
    processor.save_pretrained(folder)
    parts = (model.model.language_model, model.lm_head)
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


def _is_visible(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> torch.Tensor:
    """Returns which tokens alone are visible text, (vocab_size,), bool. The vocabulary ends in tokens without any."""
    texts = [tokenizer.decode([token_id], skip_special_tokens=True) for token_id in range(len(tokenizer))]
    visible = [text.strip().isascii() and text.strip().isprintable() and bool(text.strip()) for text in texts]
    return torch.tensor(visible + [False] * (vocab_size - len(visible)))


def _name_as_published(path: Path) -> None:
    """Gives the weights of the vision tower the names that published checkpoints have. vLLM knows no others."""
    weights = load_file(path)
    inside, published = "vision_tower.", "vision_tower.vision_model."
    save_file({name.replace(inside, published): weight for name, weight in weights.items()}, path, {"format": "pt"})
