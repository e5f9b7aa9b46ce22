"""Answers to several prompts as one stream."""

import asyncio

import pytest

from raylens.deployments.pipeline.merged_answers import MergedAnswers
from raylens.deployments.wire.stage_messages import GeneratedText


def piece(text: str, index: int = 0) -> GeneratedText:
    return GeneratedText(text, [], 1, 0, 1, None, [], index)


class Part:
    """Says some pieces, then ends, fails, or waits for ever; notes that it was closed."""

    def __init__(self, *texts: str, end: BaseException | None = None, waits: bool = False) -> None:
        self._texts, self._end, self._waits = list(texts), end, waits
        self.is_closed = False

    async def next(self) -> list[GeneratedText]:
        await asyncio.sleep(0)
        if self._texts:
            return [piece(self._texts.pop(0))]
        if self._waits:
            await asyncio.sleep(60)
        if self._end is not None:
            raise self._end
        return []

    async def aclose(self) -> None:
        self.is_closed = True


async def test_answers_keep_their_order_and_get_their_prompts_index() -> None:
    answers = MergedAnswers([Part("a", "b"), Part("c"), Part("d", "e")], num_answers=3, at_once=8)
    found: dict[int, str] = {}
    while pieces := await answers.next():
        for one in pieces:
            found[one.index] = found.get(one.index, "") + one.text
    assert found == {0: "ab", 3: "c", 6: "de"}


@pytest.mark.parametrize("number", [1, 3])
async def test_whoever_leaves_closes_every_part_at_once(number: int) -> None:
    parts = [Part("a", waits=True) for _ in range(number)]
    answers = MergedAnswers(parts, num_answers=1, at_once=8)
    await answers.next()
    await answers.aclose()
    assert all(one.is_closed for one in parts)


async def test_the_first_failure_ends_all() -> None:
    parts = [Part("a", waits=True), Part("b", end=ValueError("broken"))]
    answers = MergedAnswers(parts, num_answers=1, at_once=8)
    await answers.next()
    await answers.next()
    with pytest.raises(ValueError, match="broken"):
        await answers.next()
    assert all(one.is_closed for one in parts)
