"""A checkpoint whose answers are scripted: each of its words decides the next one, whatever came before."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoProcessor

from tests.small_models import make_checkpoint, whole_class

_HEIGHT = 1000.0
"""The logit of the next word, above those of all others."""


def save_scripted_model(
    folder: Path, next_words: Mapping[str, str], template: str, special_words: Collection[str] = ()
) -> str:
    """`next_words`: by word; each word is one token. An empty next word ends the answer. `template`: the chat template,
    which has to end a prompt with one of the words. `special_words`: are special tokens."""
    make_checkpoint("llava", folder)
    processor: Any = AutoProcessor.from_pretrained(folder)
    tokenizer = processor.tokenizer
    words = {word for pair in next_words.items() for word in pair if word}
    for word in sorted(words.union(special_words)):
        tokenizer.add_tokens([AddedToken(word, normalized=False, special=word in special_words)])
    processor.chat_template = template
    processor.save_pretrained(folder)
    model: Any = whole_class("llava").from_pretrained(folder)
    model.resize_token_embeddings(max(len(tokenizer), model.config.text_config.vocab_size), mean_resizing=False)
    embeddings, head = model.get_input_embeddings().weight.data, model.lm_head.weight.data
    torch.nn.init.normal_(embeddings)
    scripted = [tokenizer.convert_tokens_to_ids(word) for word in next_words]
    assert len(scripted) <= embeddings.shape[1], "more words than dimensions"
    embeddings[scripted] = torch.nn.init.orthogonal_(embeddings[scripted])  # so that no word stirs another's next one
    torch.nn.init.zeros_(head)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)  # each layer hands its input on
    for word, following in next_words.items():
        own = embeddings[tokenizer.convert_tokens_to_ids(word)]
        target = tokenizer.convert_tokens_to_ids(following) if following else tokenizer.eos_token_id
        head[target] += _HEIGHT * own / own.norm() ** 2
    model.save_pretrained(folder)
    return str(folder)
