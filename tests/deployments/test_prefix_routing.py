"""Two replicas of Generate: conversations come back to the one that has their beginning in its KV cache."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from raylens.deployments.config import AppConfig
from tests.pictures import disc, encoded, user_message

NUM_CONVERSATIONS = 8
NUM_TURNS = 4


@pytest.fixture(scope="module")
def app_config(shapes: str) -> AppConfig:
    return AppConfig.model_validate(
        {
            "model": shapes,
            "generate": {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.5},
            "ingress": {"num_cpus": 0.1},
            "shared": {"num_cpus": 0.1},
        }
    )


class Conversation:
    """One with a picture. `cached_shares`: of each turn's prompt, how much of it was in a KV cache."""

    def __init__(self, client: OpenAI, number: int) -> None:
        self._client = client
        picture = encoded(disc("red", (96, 96 + number), (36, 36)))
        self._messages = [user_message(f"This is conversation {number}. What colour is the circle?", picture)]
        self.cached_shares: list[float] = []

    def take_a_turn(self) -> None:
        answer = self._client.chat.completions.create(
            model="shapes", messages=self._messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        usage: Any = answer.usage
        self.cached_shares.append(usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens)
        text = answer.choices[0].message.content
        self._messages = [*self._messages, {"role": "assistant", "content": text}, user_message("And its shape?")]


def test_each_turn_finds_the_turns_before_it(client: OpenAI) -> None:
    """Conversations take turns side by side, so replicas have others in work meanwhile."""
    conversations = [Conversation(client, number) for number in range(NUM_CONVERSATIONS)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(NUM_TURNS):
            list(pool.map(Conversation.take_a_turn, conversations))
    firsts = [one.cached_shares[0] for one in conversations]
    later = [share for one in conversations for share in one.cached_shares[1:]]
    assert max(firsts) < 0.3
    assert min(later) > 0.5
