"""What a text model answers to prompts with pictures whose embeddings something else makes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from transformers import AutoTokenizer, LlamaForCausalLM


@dataclass
class TextModelOracle:
    """transformers' `generate` on the embeddings of a prompt.

    `embed`: takes a picture, returns its embeddings. `marks`: the texts around a picture. `placeholder`: the token id
    at its positions."""

    checkpoint: str
    embed: Callable[[Image.Image], torch.Tensor]
    marks: tuple[str, str]
    placeholder: int
    model: Any = field(init=False)
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model = LlamaForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)

    @torch.inference_mode()
    def expected(self, text: str, pictures: list[Image.Image], num_tokens: int) -> tuple[list[int], list[int]]:
        """Returns the ids of the prompt and of the answer. `text` has <image> in place of each picture, without
        marks."""
        ids: list[int] = []
        embeds: list[torch.Tensor] = []
        start, end = self.marks
        parts = text.split("<image>")
        for index, part in enumerate(parts):
            # The marks belong to the text around a picture, and merge with it.
            whole = (end if index else "") + part + (start if index < len(parts) - 1 else "")
            own = self.tokenizer(whole, add_special_tokens=index == 0)["input_ids"]
            ids += own
            embeds.append(self.model.get_input_embeddings()(torch.tensor(own, dtype=torch.long)))
            if index < len(pictures):
                embeds.append(self.embed(pictures[index]))
                ids += [self.placeholder] * len(embeds[-1])
        answer = self.model.generate(
            inputs_embeds=torch.cat(embeds)[None],
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        return ids, answer[0].tolist()
