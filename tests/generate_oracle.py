"""What transformers' `generate` answers, for tests that ask the same over HTTP."""

from collections.abc import Callable

import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from tests.pictures import disc

Oracle = Callable[[list[int], list[str]], list[int]]
"""Answer ids of prompt ids over discs of these colours, of 96 pixels a side."""


def generate_oracle(checkpoint: str, num_tokens: int) -> Oracle:
    """Its greedy answers have `num_tokens` tokens, whatever ends one."""
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(checkpoint)

    def answer(prompt_token_ids: list[int], colours: list[str]) -> list[int]:
        inputs = {"input_ids": torch.tensor([prompt_token_ids])}
        if colours:
            images = [disc(colour, (96, 96), (36, 36)) for colour in colours]
            inputs["pixel_values"] = processor.image_processor(images, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            output = model.generate(
                **inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, eos_token_id=None
            )
        return output[0, len(prompt_token_ids) :].tolist()  # type: ignore[no-any-return]

    return answer
