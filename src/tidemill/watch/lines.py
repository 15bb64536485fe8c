"""JSON lines of any size, read by byte offsets: a page anywhere, the first line of a step, what is new at the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

BLOCK = 1 << 20
TAIL = 1 << 14  # the first read from the end: often all that is wanted
STEP = re.compile(rb'\s*\{\s*"step":\s*(-?\d+)')

Line = tuple[int, bytes]  # where it starts, and its bytes without the line end

_decoder = msgspec.json.Decoder()


def parse(line: bytes) -> dict[str, Any] | None:
    """None: the line is cut short, or no object."""
    try:
        found = _decoder.decode(line)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) else None


def step_of(line: bytes) -> int | None:
    if (found := STEP.match(line)) is not None:
        return int(found[1])
    step = (parse(line) or {}).get("step")
    return step if isinstance(step, int) else None


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def forward(path: Path, start: int, end: int) -> Iterator[Line]:
    """Whole lines that start in [start, end); `start` is the start of a line."""
    if start >= end:
        return
    with path.open("rb") as file:
        file.seek(start)
        at, rest = start, b""
        while at < end and (block := file.read(BLOCK)):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                if at >= end:
                    return
                yield at, line
                at += len(line) + 1


def backward(path: Path, end: int, start: int = 0) -> Iterator[Line]:
    """Whole lines that start in [start, end), the last one first; `start` and `end` are starts of lines."""
    if start >= end:
        return
    with path.open("rb") as file:
        at, rest, block = end, b"", min(TAIL, BLOCK)
        while at > start:
            size = min(block, at - start)
            block = min(2 * block, BLOCK)
            at -= size
            file.seek(at)
            first, *whole = (file.read(size) + rest).split(b"\n")
            ends = at + size + len(rest)
            for line in reversed(whole):
                ends -= len(line)
                if line:  # the piece after the last line end is empty
                    yield ends, line
                ends -= 1
            rest = first + b"\n"  # a stretch ends with a line end, so every block has one
        if rest.strip():
            yield start, rest.removesuffix(b"\n")


def whole_end(path: Path) -> int:
    """Where the last whole line ends: a line that is being written does not count."""
    size = size_of(path)
    if not size:
        return 0
    with path.open("rb") as file:
        at, block = size, TAIL
        while at > 0:
            length = min(block, at)
            at -= length
            file.seek(at)
            cut = file.read(length).rfind(b"\n")
            if cut >= 0:
                return at + cut + 1
            block *= 2
    return 0


def line_after(file: BinaryIO, at: int, end: int) -> Line | None:
    """The first whole line that starts at `at` or later and before `end`."""
    start = at
    if at > 0:
        file.seek(at - 1)
        start = at - 1 + len(file.readline())  # the rest of the line before, or only its end
        if start >= end:
            return None
    file.seek(start)
    line = file.readline()
    return (start, line[:-1]) if line.endswith(b"\n") else None


def first_of_step(path: Path, step: int, end: int) -> int:
    """Where the first line of `step` or a later one starts."""
    return first_where(path, end, step, _step)


def first_where(path: Path, end: int, least: float, value: Callable[[bytes], float]) -> int:
    """Where the first line of at least this value starts: values only grow, so the bytes can be halved."""
    if not end:
        return 0
    with path.open("rb") as file:
        low, high = 0, end  # the smallest offset from which the next line has the value or more
        while low < high:
            middle = (low + high) // 2
            found = line_after(file, middle, end)
            if found is None or value(found[1]) >= least:
                high = middle
            else:
                low = found[0] + 1
        found = line_after(file, low, end)
        return end if found is None else found[0]


def _step(line: bytes) -> float:
    found = step_of(line)
    return -1 if found is None else found
