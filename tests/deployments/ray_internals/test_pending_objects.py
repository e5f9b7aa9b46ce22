"""References to what a stage yields, before and after it has yielded it, or failed."""

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from raylens.deployments.ray_internals.handles import objects_of


def ignore(*refs: Any) -> None:
    pass


async def stage(ending: str) -> AsyncGenerator[Any]:
    """A stage's two objects, or what is left of them when it ends before, or in between."""
    await asyncio.sleep(0.3)
    if ending == "error at once":
        raise ValueError("a bug")
    yield "tensors"
    if ending == "error":
        raise ValueError("a bug")
    if ending == "death":
        os._exit(1)
    yield "info"


class Stage:
    async def run(self, ending: str) -> AsyncGenerator[Any]:
        async for one in stage(ending):
            yield one


class NextStage:
    async def receive(self, refs: list[ray.ObjectRef]) -> list[Any]:
        return [await ref for ref in refs]


def actor(kind: type) -> Any:
    return ray.remote(num_cpus=0)(kind).remote()


class Response:
    """As much of Serve's response as is used."""

    def __init__(self, ending: str) -> None:
        self._actor = actor(Stage)
        self._refs = self._actor.run.options(num_returns="streaming").remote(ending)

    async def _to_object_ref_gen(self) -> Any:
        return self._refs


async def test_a_stage_answers_with_a_reference_and_a_value(ray_port: int) -> None:
    response: Any = Response("none")
    (tensors, _), info = await asyncio.wait_for(objects_of(response, 2, ignore), 60)
    assert info == "info"
    assert isinstance(tensors, ray.ObjectRef)
    del response
    assert await tensors == "tensors", "it lives as long as its reference"


@pytest.mark.parametrize("ending", ["error at once", "error", "death"])
async def test_a_stage_that_ends_before_both_are_there_gives_none(ray_port: int, ending: str) -> None:
    response: Any = Response(ending)
    with pytest.raises(RayError, match=None if ending == "death" else "a bug"):
        await asyncio.wait_for(objects_of(response, 2, ignore), 60)


@pytest.mark.parametrize("ending", ["none", "error at once"])
async def test_the_next_stage_gets_the_reference_before_the_tensors_are_there(ray_port: int, ending: str) -> None:
    response: Any = Response(ending)
    pending: asyncio.Future[ray.ObjectRef] = asyncio.get_running_loop().create_future()
    work = asyncio.create_task(objects_of(response, 2, lambda tensors, info: pending.set_result(tensors)))
    received = actor(NextStage).receive.remote([await asyncio.wait_for(pending, 60)])
    assert not work.done()
    if ending == "none":
        assert await received == ["tensors"]
        refs, info = await work
        assert (refs[0], info) == (pending.result(), "info")
    else:
        for waiting in (received, work):
            with pytest.raises(RayError, match="a bug"):
                await waiting
