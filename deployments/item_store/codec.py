"""Messages between ingress replicas and the shared state, as msgpack. Unlike Ray's own format, msgpack carries no code.

A message may also hold arrays and objects of the dataclasses and errors below. Decoding creates no other class, and
checks each field's type: a wrong type would fail later, in other clients' requests."""

import types
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from raylens.deployments.item_store.item_states import ITEM_STATES, ContentMissingError
from raylens.deployments.item_store.messages import FROM_INGRESS, FROM_SHARD, Message
from raylens.deployments.item_store.uploads import Upload
from raylens.deployments.ray_internals.references import PackedReference
from raylens.deployments.request_context import RequestContext
from raylens.deployments.stages.stage_calls import PlugInFailedError, StageFailedError, StageUnavailableError
from raylens.deployments.wire.private_port import MalformedMessageError, Reader, frame, read_frame
from raylens.preprocess.schema import InvalidRequestError, ItemExpansion, ItemInfo, PlaceholderRange, StageTime

_METADATA = (PackedReference, ItemInfo, ItemExpansion, PlaceholderRange, Upload, RequestContext, StageTime)
_DATA: tuple[type[Any], ...] = (*FROM_INGRESS, *FROM_SHARD, *ITEM_STATES, *_METADATA)
_INVALID_FIELDS = ("reason", "field", "code", "status", "item")
_STAGE_ERRORS = (StageUnavailableError, PlugInFailedError, StageFailedError)
"""Subclasses before their base classes."""
_ARRAY, _TUPLE, _INTEGER, _INVALID, _STAGE_ERROR, _CONTENT_MISSING, _FIRST_DATA = range(7)
"""msgpack extension codes. Each class of `_DATA` has its own code, from `_FIRST_DATA` on."""
_CODES = {kind: code for code, kind in enumerate(_DATA, _FIRST_DATA)}
_FIELDS = {kind: [attrgetter(one.name) for one in fields(kind)] for kind in _DATA}
_MAX_DEPTH = 16
"""Limit of nested extensions; real messages nest eight. Each level takes msgpack 40 kB of stack."""


def _type_check(annotation: Any) -> Callable[[Any], bool]:
    """Returns a predicate: is the value of the annotated type, including the contents of containers?"""
    kind = get_origin(annotation) or annotation
    if (aliased := getattr(kind, "__value__", None)) is not None:  # numpy.typing.NDArray from Python 3.12 on
        return _type_check(get_origin(aliased) or aliased)
    checks = [_type_check(part) for part in get_args(annotation)]
    if kind is Any:
        return lambda value: True
    if kind in (Union, types.UnionType):
        return lambda value: any(check(value) for check in checks)
    if kind is dict:
        check_key, check_value = checks
        return lambda value: (
            isinstance(value, dict) and all(check_key(key) and check_value(content) for key, content in value.items())
        )
    if kind in (list, tuple):  # tuples of any length
        return lambda value: isinstance(value, kind) and all(map(checks[0], value))
    accepted = (int, float) if kind is float else kind
    return lambda value: isinstance(value, accepted)


_CHECKS = {kind: [_type_check(get_type_hints(kind)[one.name]) for one in fields(kind)] for kind in _DATA}


def pack(message: Message) -> bytes:
    """Returns the frame of one message. Raises TypeError for a type that messages cannot hold."""
    return frame(_packed(message))


async def read(reader: Reader, kinds: tuple[type[Any], ...]) -> Any:
    """Returns the next message, an instance of one of `kinds`. Raises IncompleteReadError when the connection ends,
    MalformedMessageError for any other message."""
    packed = await read_frame(reader)
    try:
        message = _unpacked(packed, _MAX_DEPTH)
    except Exception as error:  # from msgpack, numpy or a class
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
        kind = _DATA[code - _FIRST_DATA]
        for check, value in zip(_CHECKS[kind], content, strict=True):
            if not check(value):
                raise TypeError(f"a {type(value).__name__} in a {kind.__name__}")
        return kind(*content)
    if code == _TUPLE:
        return tuple(content)
    if code == _ARRAY:
        dtype, shape, values = content
        return np.frombuffer(values, dtype).reshape(shape)
    if code == _INVALID:
        reason, *rest = content
        return InvalidRequestError(reason, **dict(zip(_INVALID_FIELDS[1:], rest, strict=True)))
    if code == _STAGE_ERROR:
        number, stage, message = content
        return _STAGE_ERRORS[number](stage, message)
    raise ValueError(f"code {code} of no class")
