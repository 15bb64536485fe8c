"""What computes the parts of the rule that go along sequences: Triton where it compiles for the device, else torch."""

from __future__ import annotations

from functools import cache
from typing import Any

from tidemill.device import has_triton


@cache
def kernels(kind: str) -> Any:
    """The Triton kernels for devices of a kind; None: plain torch."""
    if not has_triton(kind):
        return None
    from tidemill.models.recurrent.chunked import triton_kernels

    return triton_kernels
