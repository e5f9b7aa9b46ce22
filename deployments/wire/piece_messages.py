"""The messages that carry pieces of answers: frames of msgpack, which, unlike Ray's own format, carries no code.

The ingress unpacks a piece only when the client takes it: unpacked log-probabilities take ten times the memory. Pieces,
stage times and scored tokens are lists of their fields."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeAlias

import msgpack

from raylens.deployments.wire.private_port import MalformedMessageError, frame, read_frame
from raylens.deployments.wire.stage_messages import GeneratedText, ScoredToken
from raylens.preprocess.schema import StageTime

SentPieces: TypeAlias = tuple[int, Sequence[bytes], bool]
"""A call's number, packed pieces of its answers, and whether these are the last ones."""

_PIECE_FIELDS = [one.name for one in fields(GeneratedText)]
_TIMES = _PIECE_FIELDS.index("times")
_NUM_PLAIN_FIELDS = len(_PIECE_FIELDS) - 2  # all but the scored tokens of answer and prompt
_piece_fields: Callable[[GeneratedText], tuple[Any, ...]] = attrgetter(*_PIECE_FIELDS)
_time_fields = attrgetter(*(one.name for one in fields(StageTime)))
_token_fields = attrgetter(*(one.name for one in fields(ScoredToken)))


def pack_piece(piece: GeneratedText) -> bytes:
    packed: bytes = msgpack.packb(_packed(piece))
    return packed


def unpack_piece(packed: bytes) -> GeneratedText:
    """Raises MalformedMessageError if `packed` is no piece."""
    try:
        return _unpacked(msgpack.unpackb(packed, use_list=True, strict_map_key=False))
    except Exception as error:
        raise MalformedMessageError(f"not a piece: {error!r}") from error


def pack_message(sent: Sequence[SentPieces]) -> bytes:
    return frame(msgpack.packb(sent))


async def read_message(reader: asyncio.StreamReader) -> list[SentPieces]:
    """Returns the next message. Raises IncompleteReadError when the connection ends, MalformedMessageError for an
    invalid message."""
    body = await read_frame(reader)
    try:
        sent = [(number, packed, is_last) for number, packed, is_last in msgpack.unpackb(body)]
    except Exception as error:
        raise MalformedMessageError(f"not a message: {error!r}") from error
    for number, packed, is_last in sent:
        is_list = isinstance(packed, list) and all(isinstance(one, bytes) for one in packed)
        if not (isinstance(number, int) and is_list and isinstance(is_last, bool)):
            raise MalformedMessageError("not a message: a field of another type")
    return sent


def _packed(piece: GeneratedText) -> tuple[Any, ...]:
    if not (piece.times or piece.logprobs or piece.prompt_logprobs):  # the usual case
        return _piece_fields(piece)
    *plain, logprobs, prompt_logprobs = _piece_fields(piece)
    plain[_TIMES] = list(map(_time_fields, piece.times))
    return (*plain, list(map(_token_fields, logprobs)), list(map(_token_fields, prompt_logprobs)))


def _unpacked(packed: list[Any]) -> GeneratedText:
    if not (packed[_TIMES] or any(packed[_NUM_PLAIN_FIELDS:])):
        return GeneratedText(*packed)
    scored = [[_unpacked_token(*one) for one in tokens] for tokens in packed[_NUM_PLAIN_FIELDS:]]
    plain = packed[:_NUM_PLAIN_FIELDS]
    plain[_TIMES] = [StageTime(*one) for one in plain[_TIMES]]
    return GeneratedText(*plain, *scored)


def _unpacked_token(
    token_id: int, content: bytes, logprob: float | None, rank: int, top: list[list[Any]], offset: int
) -> ScoredToken:
    return ScoredToken(token_id, content, logprob, rank, [(number, text, value) for number, text, value in top], offset)
