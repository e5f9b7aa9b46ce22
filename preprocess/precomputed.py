"""Reads and checks items processed by the client: safetensors files of embeddings or of the model's inputs.

The file holds `size`, an integer tensor [height, width] of the picture in pixels, which determines the item's number of
positions in the prompt. It also holds either `embeddings` (num_embeds, embedding_size) or the outputs of the Hugging
Face processor. safetensors holds numbers only, and no code."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from safetensors.torch import load

from raylens.preprocess.field_layout import Fields
from raylens.preprocess.media import MediaLimits, check_image_size, check_size
from raylens.preprocess.models.family import HFProcessor, Modality, Size
from raylens.preprocess.schema import InvalidRequestError, ItemTensors, invalid_media

EMBEDDINGS = "embeddings"
_SIZE = "size"
# A processor has a handful of outputs, of some 100 bytes each in the header. Reading 300,000 empty tensors would take
# many seconds.
_MAX_HEADER_BYTES = 2**16
_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
    | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)


@dataclass(frozen=True, slots=True)
class PrecomputedItem:
    """`size`: (height, width). `tensors`: either `embeddings` or the fields of the model family."""

    size: Size
    tensors: ItemTensors

    @property
    def is_encoded(self) -> bool:
        return EMBEDDINGS in self.tensors


def read_precomputed(content: bytes, fields: Fields, *, limits: MediaLimits) -> PrecomputedItem:
    """Reads and checks a safetensors file. Raises InvalidRequestError for any other content, for a broken limit, and
    for unexpected tensors."""
    check_size(content, limits=limits)
    header_bytes = int.from_bytes(content[:8], "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise _invalid(f"the header of the file has {header_bytes} bytes, the limit is {_MAX_HEADER_BYTES}")
    try:
        tensors = load(content)
    # Hostile headers make `load` raise many types (SafetensorError, TypeError, KeyError, OverflowError, ...).
    except Exception as error:
        raise _invalid(f"the {len(content)} bytes are no safetensors file") from error
    size = _checked_size(tensors.pop(_SIZE, None), limits=limits)
    expected = {EMBEDDINGS} if EMBEDDINGS in tensors else fields.keys() & tensors.keys()
    if not expected or tensors.keys() != expected:
        raise _unexpected(tensors, expected or fields.keys())
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise _invalid(f"{name} is {_described(tensor)}, which no processor makes")
    if EMBEDDINGS in tensors and not (tensors[EMBEDDINGS].ndim == 2 and tensors[EMBEDDINGS].is_floating_point()):
        raise _invalid(f"embeddings must be floating-point numbers of two axes, not {_described(tensors[EMBEDDINGS])}")
    return PrecomputedItem(size, tensors)


def checked_inputs(
    item: PrecomputedItem, expected: ItemTensors, rules: Modality, processor: HFProcessor
) -> ItemTensors:
    """Returns the client's tensors in the server's form. `expected`: those of a blank picture of the same size.

    Fields that follow from the picture's size are taken from `expected`. These are grids, indices and masks, with which
    an encoder addresses a batch that holds other clients' items.

    Raises InvalidRequestError unless the tensors are those of `expected`, and each has the shape of its namesake, in
    the Hugging Face processor's form or in the server's, and is floating-point if its namesake is; if a field that
    follows from the size differs; and if a content field has another dtype."""
    whole = rules.unpack(processor, expected)
    if item.tensors.keys() != whole.keys():
        raise _unexpected(item.tensors, whole.keys())
    for name, given in item.tensors.items():
        has_shape = given.shape in (whole[name].shape, expected[name].shape)
        if not has_shape or given.is_floating_point() != whole[name].is_floating_point():
            raise _invalid(f"{name} is {_described(given)}, for a picture of this size {_described(whole[name])}")
    found = rules.pack(processor, item.tensors)
    for name, value in expected.items():
        is_content = name in rules.content_fields
        if name in rules.derived_fields or not (value.is_floating_point() or is_content):
            if not torch.equal(found[name].double(), value.double()):
                raise _invalid(f"{name} holds other numbers than belong to a picture of this size")
            found = found | {name: value}
        if is_content and found[name].dtype != value.dtype:
            raise _invalid(f"{name} is {_described(found[name])}, expected is {_described(value)}")
    return found


def check_finite(tensors: ItemTensors) -> None:
    """Raises InvalidRequestError for a number that is not finite in the item's stored dtype."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise _invalid(f"{name} holds numbers that are not finite as {str(tensor.dtype).removeprefix('torch.')}")


def check_embeddings(item: PrecomputedItem, num_embeds: int) -> None:
    """Raises InvalidRequestError unless the item has `num_embeds` embeddings, one for each of its positions."""
    found = len(item.tensors[EMBEDDINGS])
    if found != num_embeds:
        height, width = item.size
        raise _invalid(f"{found} embeddings for a picture of {width}x{height} pixels, which takes {num_embeds}")


def _checked_size(size: torch.Tensor | None, limits: MediaLimits) -> Size:
    if size is None or size.shape != (2,) or size.is_floating_point() or size.is_complex():
        raise _invalid(f"{_SIZE!r} must be an integer tensor [height, width]")
    height, width = (int(side) for side in size)
    check_image_size((width, height), limits=limits)
    return height, width


def _unexpected(tensors: ItemTensors, expected: Iterable[str]) -> InvalidRequestError:
    return _invalid(f"the file has {len(tensors)} tensors beside {_SIZE!r}, expected are {sorted(expected)}")


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _invalid(reason: str) -> InvalidRequestError:
    return invalid_media(reason, "invalid_tensors")
