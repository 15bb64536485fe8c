"""Tags: small named values of one row, packed as a MessagePack map by the clients. The ledger joins maps and reads
numbers; what else the clients packed stays closed here."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

NO_TAGS = b"\x80"  # an empty map
NUMBER = 17  # MessagePack extension: dtype, newline, bytes of one number of numpy
Ext = msgspec.msgpack.Ext


def joined(old: bytes, new: bytes) -> bytes:
    """Return both maps as one; values of the new one win."""
    if NO_TAGS in (old, new):
        return old if new == NO_TAGS else new
    return _encode({**_decode(old), **_decode(new)})


def pack_number(value: np.generic) -> Ext:
    return Ext(NUMBER, value.dtype.str.encode() + b"\n" + value.tobytes())


def open_number(code: int, data: memoryview) -> Any:
    if code != NUMBER:
        return Ext(code, bytes(data))
    dtype, _, raw = bytes(data).partition(b"\n")
    return np.frombuffer(raw, dtype.decode())[0]


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
with_numbers = msgspec.msgpack.Decoder(ext_hook=open_number).decode  # other extensions stay closed
