"""Messages between the replicas of the ingress and what they share, as msgpack: data and no code, unlike Ray's own.

Beside what msgpack has, a message may hold references, arrays, and objects of the dataclasses and errors below. No
other class can come out of a message."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np
from ray import ObjectRef

from deployments.request_context import RequestContext
from deployments.shared.item_states import (
    ContentMissingError,
    ItemOrder,
    ItemTrace,
    MadeItem,
    PendingItem,
    StoredItem,
)
from deployments.shared.messages import MESSAGES, Message, Need
from deployments.shared.ray_references import pack_reference, unpack_reference
from deployments.shared.stage_calls import PlugInFailedError, StageFailedError, StageUnavailableError
from deployments.shared.uploads import Upload
from deployments.shared.weight import Weight
from deployments.stages.private_port import Reader, frame, read_frame
from preprocess.schema import InvalidRequestError, ItemExpansion, ItemInfo, PlaceholderRange, StageTime

_DATA: tuple[type[Any], ...] = (
    *MESSAGES,
    ItemOrder,
    PendingItem,
    MadeItem,
    StoredItem,
    ItemTrace,
    ItemInfo,
    ItemExpansion,
    PlaceholderRange,
    Weight,
    Need,
    Upload,
    RequestContext,
    StageTime,
)
_INVALID_FIELDS = ("reason", "field", "code", "status", "item")
_STAGE_ERRORS = (StageUnavailableError, PlugInFailedError, StageFailedError)
"""A kind before those that it is one of."""
_REFERENCE, _ARRAY, _TUPLE, _INTEGER, _INVALID, _STAGE_ERROR, _CONTENT_MISSING, _FIRST_DATA = range(8)
"""Codes of msgpack's extension types. Each class of `_DATA` has one of its own, from `_FIRST_DATA` on."""
_CODES = {kind: code for code, kind in enumerate(_DATA, _FIRST_DATA)}
_FIELDS = {kind: [attrgetter(one.name) for one in fields(kind)] for kind in _DATA}


def pack(message: Message) -> bytes:
    """Returns the frame of one message. Raises TypeError for what no message may hold."""
    return frame(_packed(message))


async def read(reader: Reader) -> Any:
    """Returns the next message. Raises IncompleteReadError where the connection ends."""
    return _unpacked(await read_frame(reader))


def _packed(value: Any) -> bytes:
    # A client's texts may hold half a surrogate pair, which JSON allows.
    packed: bytes = msgpack.packb(value, default=_extension, strict_types=True, unicode_errors="surrogatepass")
    return packed


def _unpacked(packed: bytes) -> Any:
    return msgpack.unpackb(packed, ext_hook=_value, unicode_errors="surrogatepass")


def _extension(value: Any) -> msgpack.ExtType:
    kind = type(value)
    if kind in _CODES:
        return msgpack.ExtType(_CODES[kind], _packed([get(value) for get in _FIELDS[kind]]))
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _packed(list(value)))
    if kind is int:  # of more than 64 bits
        return msgpack.ExtType(_INTEGER, str(value).encode())
    if isinstance(value, ObjectRef):
        return msgpack.ExtType(_REFERENCE, _packed(list(pack_reference(value))))
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(_ARRAY, _packed([value.dtype.str, list(value.shape), value.tobytes()]))
    if isinstance(value, ContentMissingError):
        return msgpack.ExtType(_CONTENT_MISSING, b"")
    if isinstance(value, InvalidRequestError):
        return msgpack.ExtType(_INVALID, _packed([getattr(value, name) for name in _INVALID_FIELDS]))
    for number, error in enumerate(_STAGE_ERRORS):
        if isinstance(value, error):
            return msgpack.ExtType(_STAGE_ERROR, _packed([number, value.stage, str(value)]))
    raise TypeError(f"no message may hold a {kind.__name__}")


def _value(code: int, packed: bytes) -> Any:
    if code >= _FIRST_DATA:
        return _DATA[code - _FIRST_DATA](*_unpacked(packed))
    return _READERS[code](packed)


def _array(packed: Sequence[Any]) -> Any:
    dtype, shape, content = packed
    return np.frombuffer(content, dtype).reshape(shape)


def _invalid(packed: Sequence[Any]) -> InvalidRequestError:
    reason, *rest = packed
    return InvalidRequestError(reason, **dict(zip(_INVALID_FIELDS[1:], rest, strict=True)))


def _stage_error(packed: Sequence[Any]) -> Exception:
    number, stage, message = packed
    return _STAGE_ERRORS[number](stage, message)


_READERS: dict[int, Callable[[bytes], Any]] = {
    _REFERENCE: lambda packed: unpack_reference(_unpacked(packed)),
    _ARRAY: lambda packed: _array(_unpacked(packed)),
    _TUPLE: lambda packed: tuple(_unpacked(packed)),
    _INTEGER: int,
    _INVALID: lambda packed: _invalid(_unpacked(packed)),
    _STAGE_ERROR: lambda packed: _stage_error(_unpacked(packed)),
    _CONTENT_MISSING: lambda _: ContentMissingError(),
}
