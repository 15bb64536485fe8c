"""The safetensors form, written front to back from the tensors' own memory: nothing is copied on the way.

The library's own writer makes all bytes of a file first, under Python's lock, twice over; a learner that goes on
meanwhile waits for it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Form:
    """What is known of a tensor without its values."""

    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


def form(tensor: Tensor) -> Form:
    return Form(tensor.dtype, tuple(tensor.shape))


def in_order(forms: Mapping[str, Form]) -> list[str]:
    """Wide items first: so each tensor begins at a multiple of its item's size."""
    return sorted(forms, key=lambda name: (-forms[name].dtype.itemsize, name))


def head(forms: Mapping[str, Form]) -> bytes:
    """What comes before the tensors' bytes, which follow one another in the order of `forms`."""
    words: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, one in forms.items():
        end = at + one.nbytes
        words[name] = {"dtype": WORDS[one.dtype], "shape": list(one.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(words, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes: its own memory if that is contiguous and on the host."""
    if not tensor.numel():  # has strides that no view of bytes takes
        return memoryview(b"")
    found: memoryview = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data
    return found
