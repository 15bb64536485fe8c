"""The one place of the bridge where pickles are made and opened: the interface carries any Python object. Clients open
those that other holders of the dock's token put there; the ledger opens only the sampler that the dock's own starter
wrote beside it, and that sampler's state."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from tidemill.errors import MissingExtra


def dumps(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def loads(raw: bytes | memoryview) -> Any:
    return pickle.loads(raw)


def write(value: Any, path: Path) -> None:
    """Write an object with its code, so that a process without that code can read it."""
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        raise MissingExtra("a sampler of your own", str(error.name), "transferqueue") from None
    path.write_bytes(cloudpickle.dumps(value))


def read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())
