"""Merges the answers to several prompts, computed in parallel."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from raylens.deployments.pipeline.media_items import all_or_none
from raylens.deployments.wire.stage_messages import GeneratedText


class Answers(Protocol):
    """The answers to a client's request."""

    async def next(self) -> list[GeneratedText]:
        """Returns the pieces that are ready; none after the last."""
        ...

    async def aclose(self) -> None: ...


class MergedAnswers:
    """The pieces of all `parts`, which it closes. Answer i to prompt p gets the index p * num_answers + i. The first
    failure ends all parts. `at_once`: the most parts in work together."""

    def __init__(self, parts: Sequence[Answers], *, num_answers: int, at_once: int) -> None:
        self._num_answers = num_answers
        self._room = asyncio.Semaphore(at_once)
        self._ready: asyncio.Queue[list[GeneratedText]] = asyncio.Queue()
        self._work = asyncio.create_task(all_or_none([self._pass_on(*one) for one in enumerate(parts)]))
        self._work.add_done_callback(lambda _: self._ready.put_nowait([]))

    async def next(self) -> list[GeneratedText]:
        if pieces := await self._ready.get():
            return pieces
        await self._work
        return []

    async def aclose(self) -> None:
        self._work.cancel()
        await asyncio.wait([self._work])

    async def _pass_on(self, number: int, part: Answers) -> None:
        try:
            async with self._room:
                while pieces := await part.next():
                    first = number * self._num_answers
                    self._ready.put_nowait([replace(one, index=first + one.index) for one in pieces])
        finally:
            await part.aclose()
