"""Plain values and bytes between ranks: JSON and lengths, never pickles. A peer that lies sends wrong numbers, no code.

torch's object collectives unpickle what comes, so whoever got into a connection between ranks would run code in all of
them.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NOTHING = -1


def gather(value: Any, size: int, group: Any = None) -> list[Any]:
    """Every rank's value, in order of rank: None, numbers, strings, lists and dicts of them. All ranks call it."""
    return [json.loads(found) for found in gather_bytes(json.dumps(value).encode(), size, group)]


def gather_bytes(data: bytes, size: int, group: Any = None) -> list[bytes]:
    """Every rank's bytes, in order of rank; each may say as many as it likes, or none. All ranks call it."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(n) for n in lengths)
    if not longest:
        return [b""] * size
    padded = torch.zeros(longest, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(found, padded, group=group)
    return [x[: int(n)].numpy().tobytes() for x, n in zip(found, lengths)]


def broadcast(data: Tensor | None, source: int, group: Any = None) -> Tensor | None:
    """The bytes of rank `source`, or that it has none. Others give None."""
    length = torch.tensor([NOTHING if data is None else data.numel()])
    dist.broadcast(length, source, group=group)
    if int(length) == NOTHING:
        return None
    found = data if data is not None else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(found, source, group=group)
    return found
