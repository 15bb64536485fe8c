"""What computes the parts of the rule that go along sequences, and which layers are computed in chunks at all.

| kind | what it is | where |
|---|---|---|
| transformers | the module itself on dense batches (`recurrent.rows`): the plain reference | everywhere |
| chunked | its arithmetic over the packed row, Triton and torch (`layer`) | gated delta nets, where Triton compiles |

transformers' module in turn calls `flash-linear-attention`, `causal-conv1d` and `mamba-ssm` where they are installed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tidemill.device import has_triton


@cache
def kernels(kind: str) -> Any:
    """The Triton kernels for devices of a kind; None: plain torch."""
    if not has_triton(kind):
        return None
    from tidemill.models.recurrent.chunked import triton_kernels

    return triton_kernels


def is_chunked(module: Any, device: torch.device) -> bool:
    """Whether the layer is computed in chunks on this device."""
    from tidemill.models.recurrent.chunked import layer

    fast = kernels(device.type)
    return fast is not None and layer.is_known(module) and fast.fits(module.head_k_dim, module.head_v_dim)
