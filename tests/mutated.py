"""Bytes with a few things wrong, as the data of a property test says."""

from hypothesis import strategies as st


def mutated(body: bytes, data: st.DataObject) -> bytes:
    """Returns the body with one to four of its bytes changed, left out, put in or repeated, or cut off."""
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(0, len(body) - 1)))
        length = data.draw(st.integers(1, 4))
        new = data.draw(st.sampled_from([b"", body[:place]]) | st.binary(min_size=length, max_size=length))
        is_cut = data.draw(st.sampled_from([False, False, False, True]))
        body = body[:place] + new + (b"" if is_cut else body[place + length :])
    return body
