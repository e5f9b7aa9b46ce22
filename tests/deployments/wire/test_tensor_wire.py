"""Packed tensors keep every bit, and reach another process without a copy."""

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from raylens.deployments.wire.tensor_wire import PackedTensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), ()])
def test_every_bit_is_kept(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype) * 3
    unpacked = PackedTensor.pack(tensor.to(dtype)).unpack()
    assert (unpacked.dtype, unpacked.shape) == (dtype, shape)
    assert torch.equal(unpacked, tensor.to(dtype))


def test_packing_and_unpacking_share_memory() -> None:
    tensor = torch.ones(4, dtype=torch.bfloat16)
    assert PackedTensor.pack(tensor).unpack().data_ptr() == tensor.data_ptr()


def lies_in_shared_memory(item: Any) -> bool:
    address = item["pixel_values"].unpack().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return "/dev/shm" in line
    return False


def make(dtype: torch.dtype) -> Any:
    return {"pixel_values": PackedTensor.pack(torch.ones(3, 512, 512, dtype=dtype))}


def test_another_process_maps_them(ray_port: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        made = ray.remote(make).remote(dtype)
        assert ray.get(ray.remote(lies_in_shared_memory).remote(made))
