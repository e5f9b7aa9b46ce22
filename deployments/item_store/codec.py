"""Messages between ingress replicas and the shared state, as msgpack. Unlike Ray's own format, msgpack carries no code.

A message may also hold references, arrays, and objects of the dataclasses and errors below. Decoding creates no other
class, and checks each field's type: a wrong type would fail later, in other clients' requests."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, get_type_hints

import msgpack
import numpy as np
from ray import ObjectRef

from raylens.deployments.item_store.field_types import type_check
from raylens.deployments.item_store.item_states import (
    ContentMissingError,
    ItemOrder,
    ItemTrace,
    MadeItem,
    PendingItem,
    StoredItem,
)
from raylens.deployments.item_store.messages import FROM_INGRESS, FROM_SHARD, Message
from raylens.deployments.item_store.uploads import Upload
from raylens.deployments.ray_internals.references import pack_reference, unpack_reference
from raylens.deployments.request_context import RequestContext
from raylens.deployments.stages.stage_calls import PlugInFailedError, StageFailedError, StageUnavailableError
from raylens.deployments.wire.private_port import MalformedMessageError, Reader, frame, read_frame
from raylens.preprocess.schema import InvalidRequestError, ItemExpansion, ItemInfo, PlaceholderRange, StageTime

_DATA: tuple[type[Any], ...] = (
    *FROM_INGRESS,
    *FROM_SHARD,
    ItemOrder,
    PendingItem,
    MadeItem,
    StoredItem,
    ItemTrace,
    ItemInfo,
    ItemExpansion,
    PlaceholderRange,
    Upload,
    RequestContext,
    StageTime,
)
_INVALID_FIELDS = ("reason", "field", "code", "status", "item")
_STAGE_ERRORS = (StageUnavailableError, PlugInFailedError, StageFailedError)
"""Subclasses before their base classes."""
_REFERENCE, _ARRAY, _TUPLE, _INTEGER, _INVALID, _STAGE_ERROR, _CONTENT_MISSING, _FIRST_DATA = range(8)
"""msgpack extension codes. Each class of `_DATA` has its own code, from `_FIRST_DATA` on."""
_CODES = {kind: code for code, kind in enumerate(_DATA, _FIRST_DATA)}
_FIELDS = {kind: [attrgetter(one.name) for one in fields(kind)] for kind in _DATA}
_CHECKS = {kind: [type_check(get_type_hints(kind)[one.name]) for one in fields(kind)] for kind in _DATA}
_MAX_DEPTH = 16
"""Limit of nested extensions; real messages nest eight. Each level takes msgpack 40 kB of stack."""


def pack(message: Message) -> bytes:
    """Returns the frame of one message. Raises TypeError for a type that messages cannot hold."""
    return frame(_packed(message))


async def read(reader: Reader, kinds: tuple[type[Any], ...]) -> Any:
    """Returns the next message, an instance of one of `kinds`. Raises IncompleteReadError when the connection ends,
    MalformedMessageError for any other message."""
    packed = await read_frame(reader)
    try:
        message = _unpacked(packed, _MAX_DEPTH)
    except Exception as error:  # from msgpack, numpy, Ray or a class
        raise MalformedMessageError(f"not a message: {error!r}") from error
    if not isinstance(message, kinds):
        raise MalformedMessageError(f"a {type(message).__name__}, which this end is not sent")
    return message


def _packed(value: Any) -> bytes:
    # A client's text may hold half a surrogate pair, which JSON allows.
    packed: bytes = msgpack.packb(value, default=_extension, strict_types=True, unicode_errors="surrogatepass")
    return packed


def _unpacked(packed: bytes, depth: int) -> Any:
    if depth == 0:
        raise ValueError(f"more than {_MAX_DEPTH} objects within each other")
    return msgpack.unpackb(packed, ext_hook=partial(_value, depth=depth - 1), unicode_errors="surrogatepass")


def _extension(value: Any) -> msgpack.ExtType:
    kind = type(value)
    if kind in _CODES:
        return msgpack.ExtType(_CODES[kind], _packed([get(value) for get in _FIELDS[kind]]))
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _packed(list(value)))
    if kind is int:  # over 64 bits
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


def _value(code: int, packed: bytes, depth: int) -> Any:
    if code == _INTEGER:
        return int(packed)
    if code == _CONTENT_MISSING:
        return ContentMissingError()
    content = _unpacked(packed, depth)
    if code >= _FIRST_DATA:
        return _data(_DATA[code - _FIRST_DATA], content)
    return _READERS[code](content)


def _data(kind: type[Any], values: Sequence[Any]) -> Any:
    for check, value in zip(_CHECKS[kind], values, strict=True):
        if not check(value):
            raise TypeError(f"a {type(value).__name__} in a {kind.__name__}")
    return kind(*values)


def _array(content: Sequence[Any]) -> Any:
    dtype, shape, values = content
    return np.frombuffer(values, dtype).reshape(shape)


def _invalid(content: Sequence[Any]) -> InvalidRequestError:
    reason, *rest = content
    return InvalidRequestError(reason, **dict(zip(_INVALID_FIELDS[1:], rest, strict=True)))


def _stage_error(content: Sequence[Any]) -> Exception:
    number, stage, message = content
    return _STAGE_ERRORS[number](stage, message)


_READERS: dict[int, Callable[[Any], Any]] = {
    _REFERENCE: unpack_reference,
    _ARRAY: _array,
    _TUPLE: tuple,
    _INVALID: _invalid,
    _STAGE_ERROR: _stage_error,
}
