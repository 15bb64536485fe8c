"""What rows by number and rows by key share: checks of lengths, even parts, and the notes of several batches as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch


def check_length(what: str, values: Any, n: int) -> None:
    if len(values) != n:
        raise ValueError(f"{what} has {len(values)} entries for {n} rows")


def even_parts(n: int, parts: int) -> list[range]:
    base, more = divmod(n, parts)
    ends = [i * base + min(i, more) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def joined_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in joined and not _equal(joined[key], value):
                raise ValueError(f"extra_info {key!r} differs between the parts: {joined[key]!r} and {value!r}")
            joined.setdefault(key, value)
    return joined


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)
