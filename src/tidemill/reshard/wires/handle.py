"""Device handles as plain records: what another process needs to open a ring that lies on a device, as JSON.

torch tells how to rebuild a shared tensor by a function and its arguments, and sends them as a pickle. Both sides have
a ring of the same form here, so each knows the function and all types from its own; only numbers and bytes travel.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from tidemill.errors import ReshardError

PLAIN = (int, bytes, bool, type(None))


class DeviceHandle:
    """A ring of this process, opened by others, and the way to open theirs."""

    def __init__(self, ring: torch.Tensor) -> None:
        self.ring = ring
        self._rebuild, self._own = reduce_tensor(ring)  # type: ignore[no-untyped-call]

    def to_bytes(self) -> bytes:
        fields = [_to_plain(x) for x in self._own if isinstance(x, PLAIN)]
        return json.dumps(fields).encode()

    def open(self, record: bytes) -> torch.Tensor:
        """Another process's ring, of the same size as this one's."""
        fields = iter(json.loads(record))
        arguments = [_from_plain(next(fields), own) if isinstance(own, PLAIN) else own for own in self._own]
        if any(True for _ in fields):
            raise ReshardError(
                "another rank's device handle has more fields than this one's", "use one version of torch"
            )
        ring = self._rebuild(*arguments)
        assert isinstance(ring, torch.Tensor) and ring.shape == self.ring.shape
        return ring


def _to_plain(field: Any) -> Any:
    return {"bytes": field.hex()} if isinstance(field, bytes) else field


def _from_plain(field: Any, own: Any) -> Any:
    value = bytes.fromhex(field["bytes"]) if isinstance(field, dict) else field
    if type(value) is not type(own):
        kinds = f"{type(value).__name__}, not {type(own).__name__}"
        raise ReshardError(f"a field of another rank's device handle is {kinds}", "use one version of torch")
    return value
