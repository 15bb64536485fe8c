"""Objects as bytes: numbers, text, lists and maps as MessagePack, arrays and tensors as their bytes, and what nothing
else can carry as a pickle."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import torch

from tidemill.bridges.transfer_queue import pickles
from tidemill.bridges.transfer_queue.meta.schema import name_of
from tidemill.dock.keyed.tags import open_number, pack_number

_PICKLE, _ARRAY, _TENSOR = 16, 18, 19  # MessagePack extensions, beside those of the dock
_PLAIN = "biufc"  # kinds of numpy's types that are bytes


def packed(value: Any) -> bytes:
    return _encode(value)


def unpacked(raw: bytes | memoryview) -> Any:
    return _decode(raw)


def _pack(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, np.generic) and value.dtype.kind in _PLAIN:
        return pack_number(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in _PLAIN:
        return msgspec.msgpack.Ext(_ARRAY, _array_bytes(value))
    if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_nested:
        plain = value.detach().cpu().contiguous()
        raw = plain.flatten().view(torch.uint8).numpy().tobytes()
        return msgspec.msgpack.Ext(_TENSOR, _encode([name_of(plain.dtype), list(plain.shape), raw]))
    return msgspec.msgpack.Ext(_PICKLE, pickles.dumps(value))


def _open(code: int, data: memoryview) -> Any:
    if code == _PICKLE:
        return pickles.loads(data)
    if code == _ARRAY:
        return np.load(io.BytesIO(data), allow_pickle=False)
    if code == _TENSOR:
        return _tensor(data)
    return open_number(code, data)


def _array_bytes(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def _tensor(record: memoryview) -> torch.Tensor:
    dtype, shape, raw = _plain(record)
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(raw), dtype=kind).view(shape) if raw else torch.empty(shape, dtype=kind)


_plain = msgspec.msgpack.Decoder().decode
_encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
_decode = msgspec.msgpack.Decoder(ext_hook=_open).decode
