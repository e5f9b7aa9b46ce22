"""Embeddings handed over one by one: what the language model gets when."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raylens.deployments.stages.hand_over import (
    EmbeddingsLostError,
    HandOver,
    ItemEmbeddings,
    PromptLostError,
    received_prompt,
)
from raylens.deployments.wire.tensor_wire import PackedTensor
from raylens.preprocess.schema import ProcessedPrompt


def reference(packed: PackedTensor | Exception, delay: float = 0.0) -> Any:
    """As much of a reference to an object as is used."""

    async def get() -> PackedTensor:
        await asyncio.sleep(delay)
        if isinstance(packed, Exception):
            raise packed
        return packed

    return SimpleNamespace(unpack=lambda: asyncio.ensure_future(get()))


async def test_what_is_there_comes_first_and_the_rest_one_by_one() -> None:
    tensors = [torch.full((1, 2), float(index)) for index in range(3)]
    items = [
        ItemEmbeddings(reference(PackedTensor.pack(tensor), delay), is_pending=delay > 0)
        for tensor, delay in zip(tensors, (0.02, 0.0, 0.01), strict=True)
    ]
    hand_over = HandOver(items, rendered_at=0.0)
    first, second, third = await hand_over.ready()
    assert (first, third) == (None, None)
    assert second is not None
    assert second.tolist() == tensors[1].tolist()
    got: list[tuple[str, int, list[Any]]] = []
    for wait in hand_over.pending(lambda request_id, index, tensor: got.append((request_id, index, tensor.tolist()))):
        (await wait())("r")
    assert got == [("r", 0, [[0.0, 0.0]]), ("r", 2, [[2.0, 2.0]])]


@pytest.mark.parametrize("is_pending", [False, True])
async def test_a_thread_stages_embeddings_before_the_engine_gets_them(is_pending: bool) -> None:
    def stage(tensor: torch.Tensor) -> torch.Tensor:
        assert threading.current_thread() is not threading.main_thread()
        return tensor + 1

    packed = reference(PackedTensor.pack(torch.ones(1, 2)), 0.0)
    hand_over = HandOver([ItemEmbeddings(packed, is_pending)], 0.0, stage=stage)
    got = await hand_over.ready()
    for wait in hand_over.pending(lambda _, __, tensor: got.append(tensor)):
        (await wait())("r")
    (tensor,) = (one for one in got if one is not None)
    assert tensor.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("is_pending", [False, True])
async def test_embeddings_that_do_not_come_are_an_error(is_pending: bool) -> None:
    hand_over = HandOver([ItemEmbeddings(reference(ValueError("a bug")), is_pending)], 0.0)
    receive = hand_over.pending(lambda *_: None)[0] if is_pending else hand_over.ready
    with pytest.raises(EmbeddingsLostError, match="item 0: ValueError"):
        await receive()


async def test_a_prompt_that_does_not_come_is_an_error() -> None:
    prompt: Any = ProcessedPrompt([1], [], [])
    assert await received_prompt(reference(prompt)) is prompt
    with pytest.raises(PromptLostError, match="ValueError"):
        await received_prompt(reference(ValueError("a bug")))
