"""Answers to several prompts as one stream."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from raylens.deployments.pipeline.merged_pieces import merged
from raylens.deployments.wire.stage_messages import GeneratedText


def piece(text: str, index: int = 0) -> GeneratedText:
    return GeneratedText(text, [], 1, 0, 1, None, [], index)


class Stream:
    """Says some pieces, then ends, fails, or waits for ever; notes that it was closed."""

    def __init__(self, *texts: str, end: BaseException | None = None, waits: bool = False) -> None:
        self._texts, self._end, self._waits = texts, end, waits
        self.is_closed = False

    async def pieces(self) -> AsyncGenerator[list[GeneratedText]]:
        try:
            for text in self._texts:
                yield [piece(text)]
                await asyncio.sleep(0)
            if self._waits:
                await asyncio.sleep(60)
            if self._end is not None:
                raise self._end
        finally:
            self.is_closed = True


async def test_answers_keep_their_order_and_get_their_prompts_index() -> None:
    streams = [Stream("a", "b"), Stream("c"), Stream("d", "e")]
    pieces = merged([one.pieces() for one in streams], num_answers=3)
    found = [(one.index, one.text) async for ready in pieces for one in ready]
    by_index = {index: "".join(text for at, text in found if at == index) for index, _ in found}
    assert by_index == {0: "ab", 3: "c", 6: "de"}


@pytest.mark.parametrize("number", [1, 3])
async def test_whoever_leaves_closes_every_stream_at_once(number: int) -> None:
    streams = [Stream("a", waits=True) for _ in range(number)]
    pieces = merged([one.pieces() for one in streams], num_answers=1)
    await anext(pieces)
    await pieces.aclose()
    assert all(one.is_closed for one in streams)


async def test_the_first_failure_ends_all() -> None:
    streams = [Stream("a", waits=True), Stream("b", end=ValueError("broken"))]
    with pytest.raises(ValueError, match="broken"):
        [one async for one in merged([one.pieces() for one in streams], num_answers=1)]
    assert streams[0].is_closed
