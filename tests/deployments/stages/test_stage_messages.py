"""What the stages are told arrives as it was sent."""

import pickle

import pytest

from deployments.stages.stage_messages import ItemJob

JOB = ItemJob("video", b"content" * 1000, 99, 3, {"fps": 2}, is_precomputed=True)


@pytest.mark.parametrize("protocol", range(5, pickle.HIGHEST_PROTOCOL + 1))
def test_an_items_content_is_not_copied_into_the_message(protocol: int) -> None:
    beside: list[pickle.PickleBuffer] = []
    message = pickle.dumps(JOB, protocol, buffer_callback=beside.append)
    assert len(message) < len(JOB.content) / 10
    assert [buffer.raw() for buffer in beside] == [JOB.content]
    assert pickle.loads(message, buffers=beside) == JOB


def test_its_content_is_bytes_wherever_they_lie() -> None:
    beside: list[pickle.PickleBuffer] = []
    message = pickle.dumps(JOB, 5, buffer_callback=beside.append)
    found = pickle.loads(message, buffers=[memoryview(bytearray(buffer.raw())) for buffer in beside])
    assert isinstance(found.content, bytes)
    assert found == JOB
