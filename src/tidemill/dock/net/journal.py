"""The journal: every step of the ledger, appended before it is answered, and snapshots that shorten it. A killed
process loses nothing that was written, because the pages belong to the kernel. Records have a checksum; a torn last
record was never answered and is ignored. A machine that dies takes the sample bytes with it anyway, so nothing waits
for a disk."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

_HEAD = struct.Struct("<II")
_ARRAY = 1  # MessagePack extension: dtype, newline, raw bytes

Snapshot = tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, value.dtype.str.encode() + b"\n" + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"a journal cannot hold {type(value)}")


def _unpack(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code} in a journal")
    dtype, _, raw = bytes(data).partition(b"\n")
    return np.frombuffer(raw, dtype.decode())


encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode = msgspec.msgpack.Decoder(ext_hook=_unpack).decode


class Journal:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.records = 0  # since the snapshot
        self._number = max((_number(path) for path in folder.glob("journal-*")), default=0)
        self._fd = -1

    def recover(self) -> tuple[Snapshot | None, list[tuple[Any, ...]]]:
        """Read the last snapshot and everything since."""
        path = self.folder / f"snapshot-{self._number}.npz"
        snapshot = read_snapshot(path) if path.exists() else None
        return snapshot, list(read_records(self.folder / f"journal-{self._number}"))

    def open(self) -> None:
        """Continue appending; a torn end is cut off first."""
        path = self.folder / f"journal-{self._number}"
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        ends = [end for _, end in _sound(path.read_bytes())]
        self.records = len(ends)
        os.ftruncate(self._fd, ends[-1] if ends else 0)
        os.lseek(self._fd, 0, os.SEEK_END)

    def append(self, effects: Sequence[tuple[Any, ...]]) -> None:
        record = b"".join(_framed(encode(effect)) for effect in effects)
        view = memoryview(record)
        while view:
            view = view[os.write(self._fd, view) :]
        self.records += len(effects)

    def rotate(self, snapshot: Snapshot) -> None:
        """Start again from `snapshot`. The old journal is removed only when the new state is complete on disk."""
        number = self._number + 1
        record, arrays = snapshot
        packed = {"record": np.frombuffer(json.dumps(record).encode(), np.uint8), **arrays}
        path = self.folder / f"snapshot-{number}.npz"
        with open(path.with_suffix(".tmp"), "wb") as file:
            np.savez(file, allow_pickle=False, **packed)
        path.with_suffix(".tmp").rename(path)
        if self._fd >= 0:
            os.close(self._fd)
        self._number = number
        self.open()
        for old in (f"journal-{number - 1}", f"snapshot-{number - 1}.npz"):
            (self.folder / old).unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_snapshot(path: Path) -> Snapshot:
    with np.load(path, allow_pickle=False) as loaded:
        arrays = {name: loaded[name] for name in loaded.files}
    return json.loads(arrays.pop("record").tobytes()), arrays


def read_records(path: Path) -> Iterator[tuple[Any, ...]]:
    data = path.read_bytes() if path.exists() else b""
    for start, end in _sound(data):
        yield tuple(decode(data[start:end]))


def _sound(data: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size
        at = start + length
        if at > len(data) or zlib.crc32(memoryview(data)[start:at]) != checksum:
            return
        yield start, at


def _framed(record: bytes) -> bytes:
    return _HEAD.pack(len(record), zlib.crc32(record)) + record


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def next_epoch(folder: Path) -> int:
    """Increment the epoch with every start, which distinguishes earlier leases and answers."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "epoch"
    epoch = int(path.read_text()) + 1 if path.exists() else 1
    scratch = path.with_suffix(".tmp")
    scratch.write_text(str(epoch))
    os.replace(scratch, path)
    return epoch
