"""Pages of lists, as OpenAI's API has them."""

from collections.abc import Sequence
from typing import Any, TypeVar

from raylens.preprocess.schema import InvalidRequestError

_T = TypeVar("_T")


def page(items: Sequence[_T], ids: Sequence[str], limit: int, after: str | None) -> dict[str, Any]:
    """Returns the fields of a list: at most `limit` of the items, those behind the one with the id `after`. `ids`: of
    the items. Raises InvalidRequestError if none has that id."""
    if after is not None and after not in ids:
        raise InvalidRequestError(f"no item {after[:100]!r} in this list", field="after")
    first = 0 if after is None else ids.index(after) + 1
    told = ids[first : first + limit]
    return {
        "data": items[first : first + limit],
        "first_id": told[0] if told else None,
        "last_id": told[-1] if told else None,
        "has_more": first + limit < len(ids),
    }
