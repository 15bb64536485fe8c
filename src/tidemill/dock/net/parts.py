"""What messages are made of."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, tag=True):
    """One request or answer; on the wire its name, then its fields."""


class Copy(msgspec.Struct, array_like=True, frozen=True):
    """Where one copy of a chunk lies."""

    warehouse: int
    segment: int
    generation: int
    offset: int


class WirePiece(msgspec.Struct, array_like=True, frozen=True):
    """Like records.Piece: for each row its chunk (int64) and its place there (int32), or one chunk and the first
    place for all rows."""

    part: int
    chunks: bytes | int
    places: bytes | int


class ChunkAt(msgspec.Struct, array_like=True, frozen=True):
    key: int
    nbytes: int
    copies: tuple[Copy, ...]


class Outputs(msgspec.Struct, array_like=True, frozen=True):
    """What a put or a commit wrote. Arrays travel as their bytes."""

    columns: tuple[str, ...] = ()
    nbytes: int = 0
    copies: tuple[Copy, ...] = ()
    version: bytes | None = None  # int32
    length: bytes | None = None  # int32
    score: bytes | None = None  # float32
