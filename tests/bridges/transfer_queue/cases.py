"""Cases of TransferQueue's interface: each is a function of a module with that interface, and returns what happened.

The same cases run with TransferQueue on Ray and with `tidemill.bridges.transfer_queue`; their plain results must be
equal. `run.py` runs them; `recorded.json` keeps what TransferQueue answered. Cases of one session share a system, in
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

Case = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Session:
    """Settings of one system, and the cases that run in it."""

    settings: Mapping[str, Any]
    is_started: bool = True  # by `init`, before the first case


CASES: dict[str, dict[str, Case]] = {}


def case(session: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES.setdefault(session, {})[function.__name__] = function
        return function

    return add


@dataclass
class Room:
    """What a case may use: partitions of its own and a folder."""

    name: str
    folder: Path
    config: Any = None  # of the running system
    used: int = 0

    def partition(self) -> str:
        self.used += 1
        return f"{self.name}-{self.used}"


def outcome(action: Callable[[], Any]) -> Any:
    """Return the plain result of one call, or the kind of its error."""
    try:
        return plain(action())
    except BaseException as error:
        return f"raised {type(error).__name__}"


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it, with every kind of container, dtype and shape told apart."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, torch.dtype | torch.layout):
        return str(value)
    if isinstance(value, torch.Size | tuple):
        return {"tuple": [plain(v) for v in value]}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, set):
        return {"set": sorted(map(str, value))}
    if isinstance(value, Mapping) and type(value) in (dict, MappingProxyType):
        return {str(key): plain(v) for key, v in value.items()}
    return _named(value)


def _named(value: Any) -> Any:
    kind = type(value).__name__
    if kind == "TensorDict":
        names = list(value.keys())
        return {"TensorDict": {name: plain(value.get(name)) for name in names}, "batch": list(value.batch_size)}
    if kind in ("NonTensorStack", "LazyStackedTensorDict", "NonTensorData"):
        return {kind: plain(value.tolist())}
    if kind == "BatchMeta":
        names = ("global_indexes", "partition_ids", "production_status", "extra_info", "custom_meta")
        schema = {name: {key: _shape(plain(v)) for key, v in kind.items()} for name, kind in value.field_schema.items()}
        told = {name: plain(getattr(value, name)) for name in names}
        return {"BatchMeta": told, "fields": schema, "ready": value.is_ready, "size": value.size}
    if kind == "KVBatchMeta":
        names = ("keys", "tags", "partition_id", "fields", "extra_info", "size")
        return {"KVBatchMeta": {name: plain(getattr(value, name)) for name in names}}
    return repr(value) if kind in ("Thing", "bytes") else f"a {kind}"


def _shape(value: Any) -> Any:
    """Shapes come as lists, tuples and sizes, by the way that they took; that is no result."""
    if isinstance(value, dict) and "tuple" in value:
        value = value["tuple"]
    return [_shape(v) for v in value] if isinstance(value, list) else value


def _tensor(value: torch.Tensor) -> Any:
    if value.is_nested:
        return {"nested": [_tensor(t) for t in value.unbind()], "layout": str(value.layout)}
    return {
        "tensor": value.float().tolist() if value.is_floating_point() else value.tolist(),
        "dtype": str(value.dtype),
    }


class Thing:
    """An object that only a pickle can carry."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Thing({self.number})"


def rows(n: int, first: int = 0, **more: Any) -> Any:
    """A TensorDict of n rows: `ids` (n, 3) and `mask` (n, 2), and what is given."""
    from tensordict import TensorDict

    ids = torch.arange(first * 3, (first + n) * 3).view(n, 3)
    return TensorDict({"ids": ids, "mask": (ids[:, :2] % 2).float(), **more}, batch_size=n)


def jagged(*lengths: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    parts = [torch.arange(length).to(dtype) + i for i, length in enumerate(lengths)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def names(n: int, prefix: str = "key") -> list[str]:
    return [f"{prefix}{i}" for i in range(n)]
