"""Signs that a machine has an accelerator which torch cannot use, and what to do about each."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from tidemill.device import KINDS


def unused(usable: set[str]) -> list[tuple[str, str]]:
    """(what was seen, remedy) for hardware whose kind is not among the usable ones."""
    signs = {
        "cuda": _seen("nvidia-smi", "/dev/nvidia0"),
        "npu": _seen("npu-smi", "/dev/davinci0"),
    }
    remedies = {
        "cuda": "install a CUDA build of torch that goes with the driver `nvidia-smi` names",
        "npu": "source the CANN set_env.sh and install torch_npu in the version that goes with this torch"
        if importlib.util.find_spec("torch_npu") is None
        else "torch_npu is installed but torch sees no device: source the CANN set_env.sh, check `npu-smi info`",
    }
    return [(signs[k], remedies[k]) for k in KINDS if signs.get(k) and k not in usable]


def _seen(tool: str, node: str) -> str:
    if Path(node).exists():
        return f"{node} is there"
    return f"{tool} is installed" if shutil.which(tool) else ""
