"""Which replica a prompt goes to by its beginning. tests/deployments/test_prefix_routing.py serves real replicas."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.routing.prefix_router import MarkIndex, PrefixRouter, PromptAffinity
from raylens.deployments.routing.prompt_affinity import affinity_of
from raylens.deployments.routing.room_router import rank
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ChatPrompt, InterleavedPrompt, Prompt, TextPrompt, TokensPrompt

REPLICAS = ["a", "b", "c", "d"]
SYSTEM = "You are a helpful assistant. " * 40


def message(role: str, *parts: str | None) -> dict[str, Any]:
    """A message of texts; None stands for a picture."""
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": content}


def affinity(prompt: Prompt, *mm_hashes: str, salt: str = "", key: str | None = None) -> PromptAffinity:
    return affinity_of(prompt, mm_hashes, salt=salt, key=key)


def chat(*messages: dict[str, Any]) -> ChatPrompt:
    return ChatPrompt(list(messages))


# What a prompt begins with


def test_a_conversation_keeps_its_key_and_its_marks() -> None:
    turns = [message("system", SYSTEM), message("user", None, "What is this?")]
    first = affinity(chat(*turns), "hash")
    turns += [message("assistant", "A cat. " * 100), message("user", "Whose?")]
    second = affinity(chat(*turns), "hash")
    assert second.key == first.key
    assert len(second.marks) > len(first.marks) > 3
    assert list(second.marks)[: len(first.marks)] == list(first.marks)


def test_another_picture_is_another_prompt() -> None:
    prompt = chat(message("user", None, SYSTEM))
    one, other = affinity(prompt, "hash one"), affinity(prompt, "hash two")
    assert one.key != other.key
    assert not set(one.marks) & set(other.marks)


def test_a_shared_beginning_has_the_same_marks() -> None:
    prompts = [affinity(chat(message("system", SYSTEM), message("user", question))) for question in ("Who?", "What?")]
    assert prompts[0].key != prompts[1].key
    assert list(prompts[0].marks) == list(prompts[1].marks)


def test_tenants_share_nothing() -> None:
    prompt = TextPrompt("x" * 1000)
    one, other = affinity(prompt, salt="one"), affinity(prompt, salt="two")
    assert one.key != other.key
    assert not set(one.marks) & set(other.marks)
    assert affinity(prompt, salt="one", key="k").key != affinity(prompt, salt="two", key="k").key


def test_adapters_share_nothing() -> None:
    prompt = TextPrompt("x" * 1000)
    adapters = (None, "one", "two")
    requests = [
        PipelineRequest("r", prompt, [], SamplingParams(), cache_salt="tenant", adapter=adapter) for adapter in adapters
    ]
    found = [affinity(prompt, salt=request.prefix_salt) for request in requests]
    assert len({one.key for one in found}) == 3
    assert len({mark for one in found for mark in one.marks}) == sum(len(one.marks) for one in found)
    assert requests[0].prefix_salt == "tenant"


def test_the_client_s_own_key_goes_before() -> None:
    one, other = (affinity(TextPrompt(text), key="mine") for text in ("one", "two"))
    assert one.key == other.key


def test_every_form_of_prompt_has_an_affinity() -> None:
    prompts: list[Prompt] = [
        TextPrompt("y" * 300),
        TokensPrompt(list(range(200))),
        InterleavedPrompt(["a" * 200, None, "b" * 100]),
        ChatPrompt([message("user", "c" * 300)], tools=[{"name": "tool"}]),
    ]
    found = [affinity(prompt, "hash") for prompt in prompts]
    assert len({one.key for one in found}) == 4
    assert all(one.marks for one in found)


def test_half_a_surrogate_pair_is_no_reason_to_fail() -> None:
    assert affinity(TextPrompt("\ud800" * 200), key="\ud800").marks


def test_a_long_prompt_has_few_marks() -> None:
    assert len(affinity(TextPrompt("z" * 1_000_000)).marks) == 64


@given(st.text(alphabet="0123456789abcdef", min_size=1), st.lists(st.text(alphabet="0123456789abcdef", min_size=1)))
def test_an_affinity_survives_its_way_through_ray(key: str, marks: list[str]) -> None:
    assert PromptAffinity.of(PromptAffinity(key, marks).session_id) == PromptAffinity(key, marks)


# Which replica it goes to


def router_with(*had: tuple[list[str], str]) -> PrefixRouter:
    router = PrefixRouter.__new__(PrefixRouter)
    router._index = MarkIndex()
    for marks, replica_id in had:
        router._index.add(marks, replica_id)
    return router


def ranked(router: PrefixRouter, key: str, *marks: str) -> list[str]:
    return router.ranked(PromptAffinity(key, marks).session_id, REPLICAS)


def test_who_has_had_the_most_comes_first() -> None:
    router = router_with((["1", "2"], "b"), (["1", "2", "3"], "d"))
    assert ranked(router, "key", "1", "2", "3", "4")[:2] == ["d", "b"]


def test_less_than_half_is_no_reason_to_leave_the_key_s_order() -> None:
    router = router_with((["1"], "b"))
    assert ranked(router, "key", "1", "2", "3") == rank("key", REPLICAS)
    assert ranked(router, "key") == rank("key", REPLICAS)


def test_a_gap_ends_what_is_known() -> None:
    router = router_with((["1", "3", "4"], "b"))
    assert ranked(router, "key", "1", "2", "3", "4") == rank("key", REPLICAS)


def test_replicas_that_have_had_the_same_keep_the_key_s_order() -> None:
    router = router_with(*[(["1"], replica_id) for replica_id in REPLICAS])
    firsts = {ranked(router, f"key-{number}", "1")[0] for number in range(50)}
    assert firsts == set(REPLICAS)


def test_a_replica_that_has_gone_is_passed_over() -> None:
    router = router_with((["1"], "gone"))
    assert ranked(router, "key", "1") == rank("key", REPLICAS)


def test_the_oldest_marks_are_forgotten() -> None:
    index = MarkIndex(capacity=2)
    index.add(["1"], "a")
    index.add(["2"], "a")
    index.add(["1"], "b")
    index.add(["3"], "a")
    assert index.num_known(["1"], REPLICAS) == {"a": 1, "b": 1, "c": 0, "d": 0}
    assert index.num_known(["2"], REPLICAS) == dict.fromkeys(REPLICAS, 0)
