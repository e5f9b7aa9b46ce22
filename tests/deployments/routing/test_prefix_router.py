"""Which replica a prompt goes to by its beginning. tests/deployments/test_two_replicas.py serves real replicas."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylens.deployments.pipeline.pipeline_request import PipelineRequest
from raylens.deployments.routing.prefix_router import MarkIndex, PrefixRouter, PromptAffinity
from raylens.deployments.routing.prompt_affinity import affinity_of
from raylens.deployments.routing.replica_choice import HashRing, Load
from raylens.llm.sampling.params import SamplingParams
from raylens.preprocess.schema import ChatPrompt, InterleavedPrompt, Prompt, TextPrompt, TokensPrompt
from tests.made_up_router import Router

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


def test_adapters_and_salts_share_nothing() -> None:
    prompt = TextPrompt("x" * 1000)
    apart: list[dict[str, Any]] = [
        {},
        {"adapter": "one"},
        {"adapter": "two"},
        {"prompt_salt": "one"},
        {"prompt_salt": "one", "adapter": "one"},
        {"cache_salt": "other"},
    ]
    requests = [
        PipelineRequest("r", prompt, [], SamplingParams(), **{"cache_salt": "tenant", **fields}) for fields in apart
    ]
    found = [affinity(prompt, salt=request.prefix_salt) for request in requests]
    assert len({one.key for one in found}) == len(apart)
    assert len({mark for one in found for mark in one.marks}) == sum(len(one.marks) for one in found)


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
    router = Router("abcd", PrefixRouter).router
    assert isinstance(router, PrefixRouter)
    for marks, replica_id in had:
        router._index.add(marks, replica_id)
    return router


def ranked(router: PrefixRouter, key: str, *marks: str) -> list[str]:
    return list(router.ranked(PromptAffinity(key, marks)))


def order(key: str, names: str = "abcd") -> list[str]:
    ring = HashRing()
    ring.set(names)
    return list(ring.order(key))


async def test_who_has_had_the_most_comes_first() -> None:
    router = router_with((["1", "2"], "b"), (["1", "2", "3"], "d"))
    assert ranked(router, "key", "1", "2", "3", "4")[:2] == ["d", "b"]


async def test_less_than_half_is_no_reason_to_leave_the_key_s_order() -> None:
    router = router_with((["1"], "b"))
    assert ranked(router, "key", "1", "2", "3") == order("key")
    assert ranked(router, "key") == order("key")


async def test_a_gap_ends_what_is_known() -> None:
    router = router_with((["1", "3", "4"], "b"))
    assert ranked(router, "key", "1", "2", "3", "4") == order("key")


async def test_replicas_that_have_had_the_same_keep_the_key_s_order() -> None:
    router = router_with(*[(["1"], replica_id) for replica_id in REPLICAS])
    firsts = {ranked(router, f"key-{number}", "1")[0] for number in range(50)}
    assert firsts == set(REPLICAS)


async def test_a_replica_that_has_gone_is_passed_over() -> None:
    router = router_with((["1"], "gone"))
    assert ranked(router, "key", "1") == order("key")


async def test_a_replica_that_a_call_finds_dead_is_passed_over() -> None:
    router = router_with((["1"], "b"))
    router.on_replica_actor_died(router._by_id["b"].replica_id)
    assert ranked(router, "key", "1") == order("key", "acd")


def test_the_oldest_marks_are_forgotten() -> None:
    index = MarkIndex(capacity=2)
    index.add(["1"], "a")
    index.add(["2"], "a")
    index.add(["1"], "b")
    index.add(["3"], "a")
    assert index.num_known(["1"]) == {"a": 1, "b": 1}
    assert index.num_known(["2"]) == {}


def test_a_mark_keeps_its_latest_replicas() -> None:
    index = MarkIndex()
    for number in [*range(20), 4]:
        index.add(["1"], str(number))
    assert set(index.num_known(["1"])) == {str(number) for number in [4, *range(5, 20)]}


# Busy and full replicas

loads = st.builds(Load, st.integers(0, 20), st.integers(0, 20), st.booleans())


@given(st.text("abcdef", min_size=1), st.lists(loads, min_size=4, max_size=4))
def test_busy_replicas_come_behind_the_others_and_full_ones_last(key: str, drawn: list[Load]) -> None:
    async def found() -> list[list[str]]:
        made_up = Router("abcd", PrefixRouter)
        names = {replica: name for name, replica in made_up.replicas.items()}
        call: Any = SimpleNamespace(metadata=SimpleNamespace(session_id=key))
        with patch.object(PrefixRouter, "load", lambda _, replica, __: of[names[replica]]):
            return [[names[one] for one in group] for group in made_up.router.groups(call)]

    of = dict(zip(REPLICAS, drawn, strict=True))
    calls = {replica: load.num_calls for replica, load in of.items()}
    busy = max(4, 1.25 * (sum(calls.values()) + 1) / 4)
    assert min(calls.values()) < busy
    with_room = [replica for replica in order(key) if not of[replica].is_full]
    full = [replica for replica in order(key) if of[replica].is_full]
    resting = [[replica] for replica in with_room if calls[replica] < busy]
    others = [[replica] for replica in with_room if calls[replica] >= busy]
    assert asyncio.run(found()) == resting + others + [full] * bool(full)


async def test_a_burst_of_calls_with_one_key_spills_to_the_next_replica() -> None:
    made_up = Router("abc", PrefixRouter, generate=3)
    sent = Counter([await made_up.send("hot", method="generate") for _ in range(7)])
    first, second, third = (made_up.replicas[name] for name in order("hot", "abc"))
    assert sent == {first: 3, second: 3, third: 1}


async def test_calls_that_are_sent_ahead_make_a_replica_busy() -> None:
    made_up = Router("abc", PrefixRouter)
    first, second, _ = (made_up.replicas[name] for name in order("hot", "abc"))
    sent = []
    for _ in range(5):
        await made_up.rest()  # a report comes that counts none of them
        sent.append(await made_up.send_ahead("hot"))
        await asyncio.sleep(0.01)
    assert sent == [first] * 4 + [second]


async def test_a_call_looks_at_few_of_many_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unanswered(*_: object) -> None:
        """Many probes at once may be late, and a replica without a report is looked at again."""

    monkeypatch.setattr(PrefixRouter, "_probe_queue_lens", unanswered)
    made_up = Router([f"replica-{number}" for number in range(1000)], PrefixRouter)
    for replica in made_up.replicas.values():
        made_up.router.on_new_queue_len_info(replica.replica_id, 0)
    num_looks, load = Counter[str](), PrefixRouter.load

    def noted(router: PrefixRouter, replica: Any, call: Any) -> Load:
        num_looks[replica.replica_id.unique_id] += 1
        return load(router, replica, call)

    monkeypatch.setattr(PrefixRouter, "load", noted)
    marks = [f"mark-{number}" for number in range(8)]
    for number in range(200):
        await made_up.send()
        await made_up.send(PromptAffinity(f"key-{number}", marks).session_id)
    assert num_looks.total() < 400 * 40


async def test_a_replica_that_does_not_answer_delays_its_own_keys_only() -> None:
    made_up = Router("abc", PrefixRouter)
    await made_up.rest()
    silent, second, _ = order("its-key", "abc")
    made_up.replicas[silent].answers.clear()
    made_up.router.on_replica_actor_unavailable(made_up.replicas[silent].replica_id)
    other = next(key for key in map(str, range(100)) if order(key, "abc")[0] == second)
    delayed = asyncio.create_task(made_up.send("its-key"))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(made_up.send(other), 0.05)
    assert not delayed.done()
    assert await asyncio.wait_for(delayed, 5) is made_up.replicas[second]
