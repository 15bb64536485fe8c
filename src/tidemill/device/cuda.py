"""NVIDIA GPUs."""

from __future__ import annotations

import torch

from tidemill.device.accelerator import Accelerator, watts
from tidemill.device.api import Peak
from tidemill.errors import ConfigError

T = 1e12
# Vendor data sheets: dense bfloat16 with float32 accumulation (float16 where there is no bfloat16).
PEAKS = (
    ("B200", Peak(2250 * T, 8.0 * T)),
    ("GH200", Peak(989 * T, 4.0 * T)),
    ("H200", Peak(989 * T, 4.8 * T)),
    ("H100 PCIe", Peak(756 * T, 2.0 * T)),
    ("H100 NVL", Peak(835 * T, 3.9 * T)),
    ("H100", Peak(989 * T, 3.35 * T)),
    ("H20", Peak(148 * T, 4.0 * T)),
    ("A100 80GB PCIe", Peak(312 * T, 1.935 * T)),
    ("A100 80GB", Peak(312 * T, 2.039 * T)),
    ("A100", Peak(312 * T, 1.555 * T)),
    ("L40S", Peak(362 * T, 0.864 * T)),
    ("L40", Peak(181 * T, 0.864 * T)),
    ("L4", Peak(121 * T, 0.3 * T)),
    ("A10G", Peak(70 * T, 0.6 * T)),
    ("A10", Peak(125 * T, 0.6 * T)),
    ("V100", Peak(125 * T, 0.9 * T)),
    ("T4", Peak(65 * T, 0.32 * T)),
    ("RTX 4090", Peak(165 * T, 1.008 * T)),
    ("RTX 3090", Peak(71 * T, 0.936 * T)),
)


def open(index: int) -> Accelerator:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        raise ConfigError(
            f"device=cuda:{index}: torch {torch.__version__} sees no NVIDIA GPU",
            "check `nvidia-smi`; the driver may be missing or too old"
            if built
            else "install a CUDA build of torch, or use device=cpu",
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"device=cuda:{index}: there are {count} GPUs, counted from 0", f"use cuda:0 to cuda:{count - 1}"
        )
    return Accelerator(
        kind="cuda",
        index=index,
        backend=torch.cuda,
        peaks=PEAKS,
        power=_power_w,
    )


def _power_w(index: int) -> float | None:
    query = ("--query-gpu=power.draw", "--format=csv,noheader,nounits")
    return watts(("nvidia-smi", "-i", str(index), *query), r"([\d.]+)")
