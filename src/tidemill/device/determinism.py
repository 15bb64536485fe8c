"""Same inputs, same bits: what torch and the accelerators' libraries must be told before they compute anything."""

from __future__ import annotations

import importlib.util
import os

from tidemill.device.ascend import settings as npu_settings


def demand() -> None:
    """For the rest of this process. An operation that has no such form raises in stead of differing."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the library is first used
    if importlib.util.find_spec("torch_npu") is not None:
        npu_settings.apply(is_deterministic=True)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
