"""Messages of pieces arrive as they were sent."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylens.deployments.wire.piece_messages import SentPieces, pack_message, pack_piece, read_message, unpack_piece
from raylens.deployments.wire.private_port import MalformedMessageError, frame
from raylens.deployments.wire.stage_messages import GeneratedText, ScoredToken
from raylens.preprocess.schema import StageTime
from tests.mutated import mutated

SECONDS = st.floats(0, 1e6)
INTEGERS = st.integers(0, 2**40)
TEXTS = st.text(max_size=20)
LOGPROBS = st.floats(max_value=0.0, allow_nan=False)
TOKENS = st.builds(
    ScoredToken,
    INTEGERS,
    st.binary(max_size=6),
    st.none() | LOGPROBS,
    INTEGERS,
    st.lists(st.tuples(INTEGERS, st.binary(max_size=6), LOGPROBS), max_size=3),
    INTEGERS,
)
PIECES = st.builds(
    GeneratedText,
    TEXTS,
    st.lists(INTEGERS, max_size=4),
    INTEGERS,
    INTEGERS,
    INTEGERS,
    st.sampled_from([None, "stop", "length"]),
    st.lists(st.builds(StageTime, TEXTS, SECONDS, SECONDS, TEXTS), max_size=2),
    st.integers(0, 127),
    TEXTS,
    INTEGERS,
    st.none() | TEXTS,
    st.lists(st.binary(max_size=8), max_size=2),
    st.lists(TOKENS, max_size=3),
    st.lists(TOKENS, max_size=3),
)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(INTEGERS, st.lists(PIECES, max_size=3), st.booleans()), max_size=3), max_size=3))
def test_messages_arrive_as_they_were_sent(messages: list[list[tuple[int, list[GeneratedText], bool]]]) -> None:
    async def send_and_read() -> None:
        reader = asyncio.StreamReader()
        for message in messages:
            reader.feed_data(
                pack_message([(number, list(map(pack_piece, pieces)), is_last) for number, pieces, is_last in message])
            )
        reader.feed_eof()
        for message in messages:
            read = await read_message(reader)
            assert [(number, list(map(unpack_piece, packed)), is_last) for number, packed, is_last in read] == message
        with pytest.raises(asyncio.IncompleteReadError):
            await read_message(reader)

    asyncio.run(send_and_read())


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(INTEGERS, st.lists(PIECES, max_size=3), st.booleans()), max_size=3), st.data())
def test_a_mutated_message_is_a_message_or_one_kind_of_error(
    message: list[tuple[int, list[GeneratedText], bool]], data: st.DataObject
) -> None:
    async def read() -> list[SentPieces]:
        reader = asyncio.StreamReader()
        packed = pack_message([(number, list(map(pack_piece, pieces)), is_last) for number, pieces, is_last in message])
        reader.feed_data(frame(mutated(packed[4:], data)))
        return await read_message(reader)

    try:
        found = [unpack_piece(one) for _, packed, _ in asyncio.run(read()) for one in packed]
    except MalformedMessageError:
        return
    assert all(isinstance(piece, GeneratedText) for piece in found)
