"""Greedy answers of exactly so many tokens, with the ids of the prompt's and the answer's tokens."""

from collections.abc import Sequence
from typing import Any

from openai import OpenAI
from PIL import Image

from tests.pictures import encoded, user_message

NUM_TOKENS = 16
EXACTLY = {"ignore_eos": True, "return_token_ids": True, "stage_timings": True}


def ask(client: OpenAI, text: str, pictures: Sequence[Image.Image], model: str = "small") -> Any:
    return client.chat.completions.create(
        model=model,
        messages=[user_message(text, *map(encoded, pictures))],
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body=EXACTLY,
    )


def tokens_of(completion: Any) -> tuple[list[int], list[int]]:
    """Returns the ids of the prompt's tokens and of the answer's."""
    return completion.prompt_token_ids, completion.choices[0].token_ids
