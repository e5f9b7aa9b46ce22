"""The messages that carry pieces of answers: data and no code, unlike Ray's own.

A message is a frame of msgpack: for each call in it the call's number, its pieces, and whether they are the last ones.
A piece is the list of its fields, and so are a stage time and a scored token.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeAlias

import msgpack

from deployments.stages.private_port import MalformedMessageError, frame, read_frame
from deployments.stages.stage_messages import GeneratedText, ScoredToken
from preprocess.schema import StageTime

SentPieces: TypeAlias = tuple[int, list[GeneratedText], bool]
"""A call's number, pieces of its answers, and whether they are the last ones."""

_piece_fields: Callable[[GeneratedText], tuple[Any, ...]] = attrgetter(*(one.name for one in fields(GeneratedText)))
_time_fields = attrgetter(*(one.name for one in fields(StageTime)))
_TIMES = [one.name for one in fields(GeneratedText)].index("times")
_token_fields = attrgetter(*(one.name for one in fields(ScoredToken)))
_NUM_PLAIN_FIELDS = len(fields(GeneratedText)) - 2  # before the scored tokens of the answer and of the prompt


def pack_message(sent: Sequence[SentPieces]) -> bytes:
    """Returns one message."""
    body: bytes = msgpack.packb([(number, list(map(_packed, pieces)), is_last) for number, pieces, is_last in sent])
    return frame(body)


async def read_message(reader: asyncio.StreamReader) -> list[SentPieces]:
    """Returns the next message. Raises IncompleteReadError where the connection ends, MalformedMessageError for what is
    no message."""
    body = await read_frame(reader)
    try:
        sent = msgpack.unpackb(body, use_list=True, strict_map_key=False)
        return [(number, list(map(_unpacked, pieces)), is_last) for number, pieces, is_last in sent]
    except Exception as error:
        raise MalformedMessageError(f"not a message: {error!r}") from error


def _packed(piece: GeneratedText) -> tuple[Any, ...]:
    if not (piece.times or piece.logprobs or piece.prompt_logprobs):  # as most are
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
    token_id: int, content: bytes, logprob: float | None, top: list[list[Any]], offset: int
) -> ScoredToken:
    return ScoredToken(token_id, content, logprob, [(text, value) for text, value in top], offset)
