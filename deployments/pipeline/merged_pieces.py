"""Merges the answers to several prompts, computed in parallel, into one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from raylens.deployments.pipeline.media_items import all_or_none
from raylens.deployments.wire.stage_messages import GeneratedText

PieceStream = AsyncGenerator[list[GeneratedText]]


async def merged(streams: Sequence[PieceStream], *, num_answers: int) -> PieceStream:
    """Yields pieces as they come. Answer i to prompt p gets the index p * num_answers + i. The first failure ends all
    streams."""
    ready: asyncio.Queue[list[GeneratedText] | None] = asyncio.Queue()

    async def pass_on(number: int, stream: PieceStream) -> None:
        async with aclosing(stream):
            async for pieces in stream:
                ready.put_nowait([replace(one, index=one.index + number * num_answers) for one in pieces])

    work = asyncio.create_task(all_or_none([pass_on(number, stream) for number, stream in enumerate(streams)]))
    work.add_done_callback(lambda _: ready.put_nowait(None))
    try:
        while (pieces := await ready.get()) is not None:
            yield pieces
        await work
    finally:
        work.cancel()
        await asyncio.wait([work])
