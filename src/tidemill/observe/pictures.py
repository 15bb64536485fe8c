"""Images of samples as small PNG files, written once each: a file's name is what it shows."""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

FOLDER = "images"
LONGEST = 256  # pixels of the longer side

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)


def kept(run: Path, pixels: Pixels) -> str:
    """Write the picture into the run's folder, unless it is there; return its file's name."""
    small = np.ascontiguousarray(smaller(pixels))
    name = f"{hashlib.blake2b(repr(small.shape).encode() + small.tobytes(), digest_size=16).hexdigest()}.png"
    file = run / FOLDER / name
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        aside = file.with_suffix(".tmp")
        aside.write_bytes(png(small))
        aside.replace(file)
    return name


def smaller(pixels: Pixels, longest: int = LONGEST) -> Pixels:
    """Mean over squares, so that the longer side is at most `longest`."""
    by = -(-max(pixels.shape[:2]) // longest)
    if by == 1:
        return pixels
    high, wide = pixels.shape[0] // by, pixels.shape[1] // by
    if not high or not wide:  # a strip
        return pixels[::by, ::by]
    squares = pixels[: high * by, : wide * by].reshape(high, by, wide, by, 3)
    found: Pixels = squares.mean(axis=(1, 3)).round().astype(np.uint8)
    return found


def png(pixels: Pixels) -> bytes:
    high, wide, _ = pixels.shape
    lines = np.concatenate([np.zeros((high, 1), np.uint8), pixels.reshape(high, wide * 3)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
