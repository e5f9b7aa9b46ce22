"""Values reach the device, and come back, without the host waiting for anything else."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from raylens.llm.host_values import HostCopy, HostValues, send

CPU = torch.device("cpu")


def test_each_value_comes_as_it_is_at_an_address_of_its_own() -> None:
    arrays: list[npt.NDArray[Any]] = [
        np.array([[1, 2, 3]], dtype=np.int32),
        np.empty(0, dtype=np.int64),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, 1:3],
        np.array([0.5], dtype=np.float32),
        np.array([[0.1], [0.2]]),
    ]
    values = HostValues(CPU)
    indexes = [values.add(array) for array in arrays]
    values.upload()
    for index, array in zip(indexes, arrays, strict=True):
        assert values[index].tolist() == array.tolist()
        assert values[index].numpy().dtype == array.dtype
        assert values[index].data_ptr() % 16 == 0


def test_what_was_sent_is_no_longer_the_hosts() -> None:
    array = np.arange(4)
    sent = send(array, CPU)
    array[:] = 0
    assert sent.tolist() == [0, 1, 2, 3]


def test_a_copy_for_the_host_has_the_tensors_numbers() -> None:
    assert HostCopy(torch.tensor([[1, 2], [3, 4]])).read() == [[1, 2], [3, 4]]


def keep_busy() -> Any:
    """Gives a GPU work for most of a second. Returns the event of its end."""
    cuda: Any = torch.cuda
    cuda._sleep(10**9)
    end = cuda.Event()
    end.record()
    return end


@pytest.mark.gpu
def test_a_copy_is_read_while_a_gpu_computes_what_it_was_given_later() -> None:
    copy = HostCopy(torch.arange(4, device="cuda"))
    end = keep_busy()
    assert copy.read() == [0, 1, 2, 3]
    assert not end.query()


@pytest.mark.gpu
def test_what_a_busy_gpu_is_sent_may_be_changed_at_once() -> None:
    array, sent = np.zeros(1000, dtype=np.int64), []
    end = keep_busy()
    for number in range(100):
        array[:] = number
        sent.append(send(array, torch.device("cuda")))
    assert not end.query()
    assert [int(one[0]) for one in sent] == list(range(100))
