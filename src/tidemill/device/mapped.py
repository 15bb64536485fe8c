"""Device memory whose addresses outlive its bytes, so that captured graphs stay true while the memory is lent out.

An address range is reserved once; memory is put behind it, taken away (other processes and allocators then have it) and
put behind it again. On NVIDIA GPUs this is the driver's virtual memory management, called as it is; other devices have
no such memory here, and `open` says so.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from tidemill.errors import TidemillError

OUT_OF_MEMORY = 2
_held = {"now": 0, "most": 0, "lately": 0}  # bytes of this process, as torch counts its own


class Driver(Protocol):
    granularity: int  # bytes that memory comes in

    def reserve(self, nbytes: int) -> int: ...
    def back(self, address: int, nbytes: int) -> Any: ...
    def unback(self, address: int, nbytes: int, handle: Any) -> None: ...
    def free(self, address: int, nbytes: int) -> None: ...
    def view(self, address: int, nbytes: int, owner: Any) -> Tensor: ...


class DriverError(TidemillError):
    def __init__(self, call: str, status: int) -> None:
        super().__init__(
            f"the device's driver refused {call} with status {status}",
            "leave it more memory (rollout.cache_tokens, rollout.concurrent)"
            if status == OUT_OF_MEMORY
            else "update the driver",
        )
        self.status = status


@dataclass(eq=False, slots=True)
class _Range:
    """One reserved range. Whoever has a tensor in it has the range; the last one gives the addresses back."""

    driver: Driver
    address: int
    nbytes: int
    handle: Any = None

    def back(self) -> None:
        self.handle = self.driver.back(self.address, self.nbytes)
        _held["now"] += self.nbytes
        for name in ("most", "lately"):
            _held[name] = max(_held[name], _held["now"])

    def unback(self) -> None:
        self.driver.unback(self.address, self.nbytes, self.handle)
        self.handle = None
        _held["now"] -= self.nbytes

    def __del__(self) -> None:
        if sys.is_finalizing():
            return  # all of it goes with the process
        if self.handle is not None:
            self.unback()
        self.driver.free(self.address, self.nbytes)


class MappedMemory:
    """Tensors that `release` takes the memory from and `restore` gives it to again, as zeros."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.is_released = False
        self._ranges: list[tuple[_Range, Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Held on the device now."""
        return 0 if self.is_released else sum(held.nbytes for held, _ in self._ranges)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.restore()
        wanted = max(prod(shape) * dtype.itemsize, 1)
        nbytes = -(-wanted // self.driver.granularity) * self.driver.granularity
        held = _Range(self.driver, self.driver.reserve(nbytes), nbytes)
        held.back()
        whole = self.driver.view(held.address, nbytes, held)
        _clear(whole)
        self._ranges.append((held, whole))
        return whole[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def release(self) -> None:
        """Nothing may use the tensors from here to `restore`, work under way included: the caller has waited for it."""
        self.is_released = True
        for held, _ in self._ranges:
            if held.handle is not None:
                held.unback()

    def restore(self) -> None:
        """Where there is too little memory for all of it, that is an error, and it can be tried again."""
        if self.is_released:
            for held, whole in self._ranges:
                if held.handle is None:
                    held.back()
                    _clear(whole)
            self.is_released = False


def most_bytes() -> int:
    """The most that this process has held at once; torch's own counters do not know of it."""
    return _held["most"]


def most_bytes_lately() -> int:
    """The same since the last call."""
    found, _held["lately"] = _held["lately"], _held["now"]
    return found


def _clear(whole: Tensor) -> None:
    with torch.inference_mode():  # tensors made in that mode can be written in no other
        whole.zero_()


def open(device: torch.device) -> MappedMemory | None:
    """None where a device has no such memory."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    driver = CudaDriver(device)
    return MappedMemory(driver) if driver.is_able else None


# -- NVIDIA --------------------------------------------------------------------------------------------------------


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_PINNED, _DEVICE, _READ_WRITE, _HAS_VIRTUAL_MEMORY = 1, 1, 3, 102


class CudaDriver:
    """The calls it takes, by their names in the CUDA driver API."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device(device.type, index)
        torch.zeros(1, device=self.device)  # makes the device's context this thread's
        self._library = ctypes.CDLL("libcuda.so.1")
        one, answer = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(one), ctypes.c_int(index))
        self._call("cuDeviceGetAttribute", ctypes.byref(answer), ctypes.c_int(_HAS_VIRTUAL_MEMORY), one)
        self.is_able = bool(answer.value)  # not on every virtual device
        if not self.is_able:
            return
        self._location = _Location(_DEVICE, index)
        self._properties = _AllocationProperties(type=_PINNED, location=self._location)
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), ctypes.c_int(0))
        self.granularity = int(size.value)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DriverError(name, status)

    def reserve(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        size, none = ctypes.c_size_t(nbytes), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), none, none)
        return int(address.value)

    def back(self, address: int, nbytes: int) -> Any:
        torch.zeros(1, device=self.device)  # as above: a rollout may have a thread of its own
        try:
            handle = self._create(nbytes)
        except DriverError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            torch.cuda.empty_cache()  # what torch keeps for later and nobody has now
            handle = self._create(nbytes)
        size, zero = ctypes.c_size_t(nbytes), ctypes.c_uint64(0)
        access, is_mapped = _Access(self._location, _READ_WRITE), False
        try:
            self._call("cuMemMap", ctypes.c_uint64(address), size, ctypes.c_size_t(0), handle, zero)
            is_mapped = True
            self._call("cuMemSetAccess", ctypes.c_uint64(address), size, ctypes.byref(access), ctypes.c_size_t(1))
        except DriverError:  # whoever tries again finds the range as it was
            if is_mapped:
                self._call("cuMemUnmap", ctypes.c_uint64(address), size)
            self._call("cuMemRelease", handle)
            raise
        return handle

    def _create(self, nbytes: int) -> ctypes.c_uint64:
        handle = ctypes.c_uint64()
        properties, flags = ctypes.byref(self._properties), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(nbytes), properties, flags)
        return handle

    def unback(self, address: int, nbytes: int, handle: Any) -> None:
        if not torch.cuda.is_current_stream_capturing():  # a forgotten engine may be collected then
            torch.cuda.synchronize(self.device)
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        self._call("cuMemRelease", handle)

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def view(self, address: int, nbytes: int, owner: Any) -> Tensor:
        return torch.as_tensor(_Bytes(address, nbytes, owner), device=self.device)


class _Bytes:
    """Memory in the form that torch takes over without copying; a tensor made of it keeps it, and with it the owner."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
