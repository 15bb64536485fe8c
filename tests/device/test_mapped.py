"""Memory that keeps its addresses, over a driver that stands for a device's: host memory that turns to rubbish when it
is taken away. The real driver is checked by `benchmarks/gpu_truncated.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tidemill.device import mapped
from tidemill.device.mapped import DriverError, MappedMemory


class HostDriver:
    """Implements `mapped.Driver`."""

    granularity = 4096

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most
        self.reserved: dict[int, Tensor] = {}
        self.backed: dict[int, int] = {}

    def reserve(self, nbytes: int) -> int:
        held = torch.empty(nbytes, dtype=torch.uint8)
        self.reserved[held.data_ptr()] = held
        return held.data_ptr()

    def back(self, address: int, nbytes: int) -> Any:
        assert address not in self.backed
        if sum(self.backed.values()) + nbytes > self.most:
            raise DriverError("create", mapped.OUT_OF_MEMORY)
        self.backed[address] = nbytes
        return object()

    def unback(self, address: int, nbytes: int, handle: Any) -> None:
        assert handle is not None and self.backed.pop(address) == nbytes
        with torch.inference_mode():
            self.reserved[address].fill_(0xAB)

    def free(self, address: int, nbytes: int) -> None:
        assert address not in self.backed
        del self.reserved[address]

    def view(self, address: int, nbytes: int, owner: Any) -> Tensor:
        return self.reserved[address][:nbytes]


def test_addresses_stay_while_the_memory_goes_and_comes_back_as_zeros() -> None:
    driver = HostDriver()
    memory = MappedMemory(driver)
    first, second = memory.zeros((3, 5), dtype=torch.float32), memory.zeros((2000,), dtype=torch.bfloat16)
    assert not first.any() and not second.any() and memory.nbytes == 2 * 4096
    first.fill_(1.0)
    where = first.data_ptr(), second.data_ptr()
    memory.release()
    memory.release()  # again is nothing
    assert not driver.backed and memory.nbytes == 0
    memory.restore()
    assert sum(driver.backed.values()) == memory.nbytes == 2 * 4096
    assert (first.data_ptr(), second.data_ptr()) == where and not first.any() and not second.any()


def test_a_tensor_made_while_the_memory_is_away_brings_it_back() -> None:
    memory = MappedMemory(HostDriver())
    first = memory.zeros((7,), dtype=torch.int8)
    memory.release()
    assert not memory.zeros((7,), dtype=torch.int8).any() and not first.any() and not memory.is_released


def test_forgotten_memory_gives_its_addresses_back_too() -> None:
    driver = HostDriver()
    memory = MappedMemory(driver)
    memory.zeros((100,), dtype=torch.float32)
    memory.release()
    del memory
    assert not driver.reserved
    memory = MappedMemory(driver)
    memory.zeros((100,), dtype=torch.float32)
    del memory
    assert not driver.reserved and not driver.backed


def test_too_little_memory_is_an_error_with_a_remedy() -> None:
    memory = MappedMemory(HostDriver(most=4096))
    memory.zeros((10,), dtype=torch.int8)
    with pytest.raises(DriverError, match="cache_tokens"):
        memory.zeros((10,), dtype=torch.int8)


def test_memory_that_could_not_come_back_whole_comes_back_later() -> None:
    driver = HostDriver(most=3 * 4096)
    memory = MappedMemory(driver)
    tensors = [memory.zeros((10,), dtype=torch.int8) for _ in range(3)]
    memory.release()
    driver.most = 2 * 4096  # somebody else has the rest
    with pytest.raises(DriverError):
        memory.restore()
    assert memory.is_released
    driver.most = 3 * 4096
    memory.restore()
    assert not memory.is_released and len(driver.backed) == 3 and not any(t.any() for t in tensors)
    driver.most = 0
    memory.release()
    with pytest.raises(DriverError):
        memory.restore()
    memory.release()  # and a failed one can be given up
    assert not driver.backed


def test_a_cpu_has_no_such_memory() -> None:
    assert mapped.open(torch.device("cpu")) is None
